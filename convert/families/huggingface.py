"""What Hugging Face's classes have in common: tables, rotary embedding, layer types."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.families import read
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.rows import Names, bare
from stree_jax.convert.source import OWN_FORMAT
from stree_jax.models import AttentionConfig, MambaConfig, ModelConfig
from stree_jax.models.config import LayerKind, Rope, given
from stree_jax.models.config_json import MAX_LAYERS, MAX_SIZE

Layers = tuple[LayerKind, ...]
MIXERS: dict[str, LayerKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
PARTS = ("vocab_size", "num_tokens", "mamba", "attention", "mlp", "moe", "shared")

# transformers 5.23 takes the logarithm of `time_step_min`, so that it cannot be 0.
NO_FLOOR = 1e-30

# The whole model


def model_table(
    eps: str, default_eps: float, d_model: int = 4096, tied: bool = False
) -> tuple[Field, ...]:
    return (
        Field("hidden_size", "d_model", read.size, d_model),
        Field("tie_word_embeddings", "tie_embeddings", read.flag, tied),
        Field(
            "eos_token_id",
            "stop_tokens",
            read.token_ids,
            (),
            lambda ids: list(ids) or None,
        ),
        Field(eps, "norm_eps", read.positive, default_eps),
    )


def read_model(
    table: Sequence[Field], source: ConfigFields, *names: Names
) -> dict[str, Any]:
    """Attributes of `ModelConfig` by a table; all rows of the embedding are tokens.

    Args:
      names: of the family, one of which is the checkpoint's.
    """
    rows, _ = vocabulary(source, *names)
    return {"vocab_size": rows, "num_tokens": rows, **read_fields(table, source)}


def write_model(
    format: str, table: Sequence[Field], config: ModelConfig
) -> dict[str, Any]:
    return write_fields(format, table, config, ("layers", *PARTS))


def vocabulary(source: ConfigFields, *names: Names) -> tuple[int, int]:
    """Rows of the embedding, and how many of them are real tokens."""
    known = [f"{n.embedding}.weight" for n in (*names, *map(bare, names))]
    heads = [f"{n.head}.weight" for n in names]  # all that some tied files have
    found = next((name for name in known + heads if name in source.tensors), None)
    if found is None:
        raise _no_embedding(source, known[: len(names)])
    file, shape = source.tensors[found].file, source.tensors[found].shape
    if len(shape) != 2 or not 0 < shape[0] <= MAX_SIZE:
        raise CheckpointError(f"{file}: {found}: want shape [V, d], got {list(shape)}")
    return shape[0], min(source.size("vocab_size", shape[0]), shape[0])


def _no_embedding(source: ConfigFields, known: list[str]) -> CheckpointError:
    """An error that says which names the weights have instead."""
    what = f"no embedding (want {', '.join(known)})"
    if "tok_embeddings.weight" in source.tensors:
        what += f"; {OWN_FORMAT}"
    elif source.tensors:
        what += f"; the weights begin with {reprlib.repr(min(source.tensors))}"
    return CheckpointError(f"{source.file.parent}: {what}")


def check_silu(source: ConfigFields) -> None:
    source.choice("hidden_act", "silu", ("silu", "swish"))


# Layers


def with_mlps(mixers: Layers, second: LayerKind = "mlp") -> Layers:
    """An MLP, or experts, after every mixer."""
    return tuple(kind for mixer in mixers for kind in (mixer, second))


def named_layers(
    source: ConfigFields, name: str, kinds: Mapping[str, LayerKind], plan: Any
) -> Layers:
    """Kinds of layers by their names in a family.

    Args:
      name: of the field that holds `plan`, a list of names or a string of letters.
    """
    if len(plan) > MAX_LAYERS:
        raise source.error(name, f"{len(plan)} layers, want at most {MAX_LAYERS}")
    for kind in plan:
        if not isinstance(kind, str) or kind not in kinds:
            raise source.error(name, f"unknown layer type {reprlib.repr(kind)}")
    return tuple(kinds[kind] for kind in plan)


def counted_layers(
    source: ConfigFields,
    name: str,
    kinds: Mapping[str, LayerKind],
    count: int,
    *default: list[str],
) -> Layers:
    """As many layers as another field says, by the names of their kinds."""
    plan = source.get(name, *default)
    if not isinstance(plan, list) or len(plan) != count:
        raise source.error(name, f"want a list of {count} layer types")
    return named_layers(source, name, kinds, plan)


def mixers(source: ConfigFields, count: int, default: list[str]) -> Layers:
    """From `layer_types` or its older name `layers_block_type`."""
    newer = source.get("layer_types", None) is not None
    name = "layer_types" if newer else "layers_block_type"
    return counted_layers(source, name, MIXERS, count, default)


def chosen_mixers(source: ConfigFields, name: str, count: int) -> Layers:
    """Attention in the layers whose numbers a field has, Mamba2 in all others."""
    chosen = source.chosen_layers(name, count)
    return tuple("attention" if i in chosen else "mamba" for i in range(count))


# Attention

HEADS = Field("num_attention_heads", "num_heads", read.size)


def _head_dim(source: ConfigFields, name: str, default: Any) -> int:
    """By default, the heads together are as wide as the model."""
    if source.get(name, None) is None:
        width = source.size("hidden_size", 4096)
        return source.divide(HEADS.name, width, HEADS.value(source))
    return source.size(name)


HEAD_DIM = Field("head_dim", "head_dim", _head_dim)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.divisor(HEADS))
ATTENTION = (
    HEADS,
    KV_HEADS,
    Field("attention_bias", "qkv_bias", read.tensor("self_attn.q_proj.bias")),
    Field("attention_bias", "out_bias", read.tensor("self_attn.o_proj.bias")),
)


def check_width(format: str, config: ModelConfig, c: AttentionConfig) -> None:
    """For classes that know no head_dim."""
    require(format, {"head_dim": c.num_heads * c.head_dim == config.d_model})


def rope(source: ConfigFields, head_dim: int, partial: float | None = None) -> Rope:
    """Rotary embedding from either spelling: rope_parameters, or rope_theta and
    rope_scaling (whose `type` is an old name of `rope_type`).

    Args:
      partial: share of a head that rotates if the config does not say; None: all, and
        the class does not know any other.
    """
    newer = source.get("rope_parameters", None) is not None
    scaling = source.object("rope_parameters" if newer else "rope_scaling")
    theta = scaling.positive("rope_theta", source.positive("rope_theta", 10000.0))
    old_name = "rope_type" if "rope_type" in scaling.values else "type"
    kind = scaling.choice(old_name, "default", ("default", "llama3"))
    dim = head_dim
    if partial is None:
        scaling.choice("partial_rotary_factor", 1.0, (1.0,))
    else:
        share = scaling.positive("partial_rotary_factor", partial)
        dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise source.error(
            "head_dim", f"{dim} of {head_dim} channels rotate; want pairs of them"
        )
    if kind == "default":
        return Rope(theta, dim)
    factor, low, high, old = (scaling.positive(name) for name in LLAMA3)
    if low >= high:
        raise scaling.error("high_freq_factor", f"want more than {low}, got {high}")
    return Rope(theta, dim, (factor, low, high, old))


LLAMA3 = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def rope_fields(format: str, c: AttentionConfig) -> dict[str, Any]:
    """Rotary embedding of the whole head, in the older spelling; nothing if none."""
    if c.rope is None:
        return {}
    require(format, {"partial rotary": c.rope.dim == c.head_dim})
    values: dict[str, Any] = {"rope_theta": c.rope.theta}
    if c.rope.llama3 is not None:
        *factors, old = c.rope.llama3
        scaling = dict(zip(LLAMA3, (*factors, int(old)), strict=True))
        values["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return values


# Mamba2


def mamba_table(
    width: Callable[[ConfigFields], int], out_bias: str = "mamba_proj_bias"
) -> tuple[Field, ...]:
    """A mixer in the `mamba_` fields of Granite, Bamba and Falcon-H1.

    Args:
      width: of all heads together, where the size of one is "auto".
      out_bias: field of the bias of out_proj.
    """
    heads = Field("mamba_n_heads", "num_heads", read.size, 128)

    def head_dim(source: ConfigFields, name: str, default: str) -> int:
        count, whole = heads.value(source), width(source)
        if source.get(name, default) == default:
            return source.divide(heads.name, whole, count)
        return source.size(name)

    return (
        heads,
        Field("mamba_n_groups", "n_groups", read.divisor(heads), 1),
        Field("mamba_d_head", "head_dim", head_dim, "auto"),
        Field("mamba_d_state", "d_state", read.size, 256),
        Field("mamba_d_conv", "d_conv", read.size, 4),
        Field("mamba_proj_bias", "proj_in_bias", read.tensor("mamba.in_proj.bias")),
        Field(out_bias, "proj_out_bias", read.tensor("mamba.out_proj.bias")),
        Field("mamba_conv_bias", "conv_bias", read.tensor("conv1d.bias")),
        TIME_STEP_LIMIT,
    )


TIME_STEP_LIMIT = Field(
    "time_step_limit", "dt_limit", read.limits, read.NO_LIMITS, list
)


def expanded(source: ConfigFields) -> int:
    """Width of a mixer that is a multiple of the model's."""
    return source.size("mamba_expand", 2) * source.size("hidden_size", 4096)


def expand(format: str, config: ModelConfig) -> int:
    """The multiple that `expanded` reads."""
    d_inner = given(config.mamba).d_inner
    require(format, {"d_inner": d_inner % config.d_model == 0})
    return d_inner // config.d_model


def read_mamba(table: Sequence[Field], source: ConfigFields, eps: float) -> MambaConfig:
    """A mixer by a table; its norm has the groups of C."""
    values = read_fields(table, source)
    return MambaConfig(**values, norm_groups=values["n_groups"], norm_eps=eps)


def write_mamba(
    format: str,
    table: Sequence[Field],
    m: MambaConfig,
    eps: float,
    elsewhere: tuple[str, ...] = (),
) -> dict[str, Any]:
    values = write_fields(format, table, m, ("norm_groups", "norm_eps", *elsewhere))
    grouped = m.norm is None or m.norm_groups == m.n_groups
    require(format, {"norm groups": grouped, "norm_eps": m.norm_eps == eps})
    return values


def floor_field(m: MambaConfig) -> dict[str, float]:
    """For classes where transformers 5.23 takes it for the lower limit of dt."""
    return {"time_step_min": m.dt_limit[0] or NO_FLOOR}


# MLP


def gated_mlp_table(d_hidden: int, module: str) -> tuple[Field, ...]:
    return (
        Field("intermediate_size", "d_hidden", read.size, d_hidden),
        Field("mlp_bias", "bias", read.tensor(f"{module}.down_proj.bias")),
    )
