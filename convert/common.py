"""What config files of several formats have in common."""

import reprlib
from collections.abc import Mapping

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import MAX_SIZE, Fields
from stree_jax.convert.source import TensorInfo
from stree_jax.convert.tensors import FORMATS
from stree_jax.models.config import AttentionConfig, LayerKind, MambaConfig, Rope

Tensors = Mapping[str, TensorInfo]
Layers = tuple[LayerKind, ...]
MLP: LayerKind = "mlp"
MAMBA_KINDS = ("mamba", "linear_attention")
ATTENTION_KINDS = ("attention", "full_attention")


def vocabulary(fields: Fields, tensors: Tensors) -> tuple[int, int]:
    """Rows of the embedding, and how many of them are real tokens."""
    names = [f"{names.embedding}.weight" for names in FORMATS.values()]
    found = next((name for name in names if name in tensors), None)
    if found is None:
        known = ", ".join(dict.fromkeys(names))
        raise CheckpointError(f"{fields.file.parent}: no embedding (want {known})")
    shape = tensors[found].shape
    if len(shape) != 2 or not 0 < shape[0] <= MAX_SIZE:
        raise CheckpointError(
            f"{tensors[found].file}: {found}: want shape [V, d], got {list(shape)}"
        )
    return shape[0], min(fields.size("vocab_size", shape[0]), shape[0])


def divide(fields: Fields, name: str, whole: int, parts: int) -> int:
    if whole % parts:
        raise fields.error(name, f"{parts} does not divide {whole}")
    return whole // parts


def with_mlps(mixers: Layers) -> Layers:
    """An MLP after every mixer."""
    return tuple(kind for mixer in mixers for kind in (mixer, MLP))


def has(tensors: Tensors, ending: str, part: str = "") -> bool:
    """Whether any tensor (of a part of the model, such as "layers.3.") ends so."""
    return any(name.endswith(ending) and part in name for name in tensors)


def rope(fields: Fields, head_dim: int, partial: float | None = None) -> Rope:
    """Rotary embedding from either spelling: rope_parameters, or rope_theta and
    rope_scaling (whose `type` is an old name of `rope_type`).

    Args:
      partial: share of a head that rotates if the config does not say; None: all, and
        the class does not know any other.
    """
    newer = fields.get("rope_parameters", None) is not None
    scaling = fields.object("rope_parameters" if newer else "rope_scaling")
    theta = scaling.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    old_name = "rope_type" if "rope_type" in scaling.values else "type"
    kind = scaling.choice(old_name, "default", ("default", "llama3"))
    dim = head_dim
    if partial is None:
        scaling.choice("partial_rotary_factor", 1.0, (1.0,))
    else:
        share = scaling.positive("partial_rotary_factor", partial)
        dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise fields.error(
            "head_dim", f"{dim} of {head_dim} channels rotate; want pairs of them"
        )
    if kind == "default":
        return Rope(theta, dim)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (scaling.positive(name) for name in names)
    if low >= high:
        raise scaling.error("high_freq_factor", f"want more than {low}, got {high}")
    old = scaling.positive("original_max_position_embeddings")
    return Rope(theta, dim, (factor, low, high, old))


def attention_config(fields: Fields, tensors: Tensors, d_model: int) -> AttentionConfig:
    """Attention as Hugging Face's Llama family writes it."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    divide(fields, "num_key_value_heads", heads, kv_heads)
    default = None
    if "head_dim" not in fields.values or fields.values["head_dim"] is None:
        default = divide(fields, "num_attention_heads", d_model, heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.size("head_dim", default),
        qkv_bias=has(tensors, "self_attn.q_proj.bias"),
        out_bias=has(tensors, "self_attn.o_proj.bias"),
    )


def mamba_config(
    fields: Fields, tensors: Tensors, d_inner: int, eps: float
) -> MambaConfig:
    """A Mamba2 mixer as the classes with `mamba_` fields write it."""
    heads = fields.size("mamba_n_heads", 128)
    groups = fields.size("mamba_n_groups", 1)
    divide(fields, "mamba_n_groups", heads, groups)
    head_dim = fields.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = divide(fields, "mamba_n_heads", d_inner, heads)
    else:
        head_dim = fields.size("mamba_d_head")
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        d_state=fields.size("mamba_d_state", 256),
        n_groups=groups,
        d_conv=fields.size("mamba_d_conv", 4),
        norm_groups=groups,
        norm_eps=eps,
        proj_in_bias=has(tensors, "mamba.in_proj.bias"),
        proj_out_bias=has(tensors, "mamba.out_proj.bias"),
        conv_bias=has(tensors, "conv1d.bias"),
        dt_limit=fields.limits("time_step_limit"),
    )


def layer_kinds(fields: Fields, count: int, default: list[str]) -> Layers:
    """Mixers by layer from `layer_types` or its older name `layers_block_type`."""
    newer = fields.get("layer_types", None) is not None
    named = "layer_types" if newer else "layers_block_type"
    kinds = fields.get(named, default)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error(named, f"want a list of {count} layer types")
    for kind in kinds:
        if kind not in MAMBA_KINDS + ATTENTION_KINDS:
            raise fields.error(named, f"unknown layer type {reprlib.repr(kind)}")
    return tuple("mamba" if kind in MAMBA_KINDS else "attention" for kind in kinds)
