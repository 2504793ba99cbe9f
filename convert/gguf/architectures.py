"""Converts llama.cpp's architectures to ours: metadata keys and names of tensors.

Key names are given without their prefix, which is the architecture's name. Differences
from the Hugging Face directories that the files were made from:

- A itself is stored instead of its logarithm; D and A are columns.
- The mixer's norm is stored in groups.
- gate and up are separate tensors; all experts are one tensor.
- q and k are ordered in pairs where llama.cpp's rotary embedding rotates neighbouring
  channels.
- Falcon-H1's multipliers are multiplied into the weights.
- There are no limits of dt.

Sources: llama.cpp's `conversion/` (granite, llama, mamba, nemotron, falcon_h1), its
`llama-arch.cpp`, and the `gguf` package's constants.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax.convert.families import read
from stree_jax.convert.families.huggingface import Layers, with_mlps
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.fields import MAX_EXPERTS, ConfigFields
from stree_jax.convert.gguf.blocks import without_ones
from stree_jax.convert.gguf.rotary import rope
from stree_jax.convert.rows import ENDINGS, Names, Part, Path, Row
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.config import blocks, named
from stree_jax.models.config_json import MAX_LAYERS

EMBEDDING, HEAD = "token_embd", "output"
BLOCKS, KV_HEADS = "block_count", "attention.head_count_kv"
FEED_FORWARD = "feed_forward_length"
INNER = "ssm.inner_size"
VALUE_LENGTH = "attention.value_length"  # size of a head's values, as of its keys
ROTATES = "rope.scaling.finetuned"  # true if Granite's attention has a rotary embedding
# The router's function of the logits. 0 means the architecture's default.
GATING, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
# Keys that would change the model's results and are not supported, with the values that
# have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0, 1),
    "attention.output_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
    "leading_dense_block_count": (0,),
    # YaRN keys that llama.cpp reads only for other architectures.
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "expert_count": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    GATING: (0, SOFTMAX),
    "expert_weights_scale": (0, 1),
    "ssm.dt_b_c_rms": (False,),
}

# Tensors


def _linear(ours: Path, block: str, names: dict[str, str]) -> Iterator[Row]:
    """Yields the rows of weights and biases of projections, by our parameters'
    names."""
    for ending, ours_too in ENDINGS:
        for param, name in names.items():
            yield Row((*ours, param + ours_too), (f"{block}{name}.{ending}",))


def _joined(
    ours: Path, block: str, param: str, names: tuple[str, ...], row: Row
) -> Iterator[Row]:
    """Yields the rows of a projection that consists of several tensors, with the sizes
    and heads of `row`."""
    for ending, ours_too in ENDINGS:
        tensors = tuple(f"{block}{name}.{ending}" for name in names)
        yield replace(row, path=(*ours, param + ours_too), sources=tensors)


def mamba_rows(ours: Path, block: str, c: MambaConfig) -> Iterator[Row]:
    yield from _linear(ours, block, {"in_proj": "ssm_in", "out_proj": "ssm_out"})
    conv = {"conv_weight": "weight", "conv_bias": "bias"}
    for param, ending in conv.items():
        yield Row((*ours, param), (f"{block}ssm_conv1d.{ending}",))
    yield Row((*ours, "dt_bias"), (f"{block}ssm_dt.bias",))
    column = without_ones((c.num_heads, 1))
    yield Row((*ours, "A_log"), (f"{block}ssm_a",), "decay", column)
    yield Row((*ours, "D"), (f"{block}ssm_d",), "shape", column)
    groups = without_ones((c.norm_groups, c.d_inner // c.norm_groups))
    yield Row((*ours, "norm"), (f"{block}ssm_norm.weight",), "shape", groups)


def attention_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    each = Row((), (), "concat", (q, kv, kv))
    yield from _joined(ours, block, "qkv", ("attn_q", "attn_k", "attn_v"), each)
    yield from _linear(ours, block, {"out": "attn_output"})
    for norm in ("q_norm", "k_norm"):
        yield Row((*ours, norm), (f"{block}attn_{norm}.weight",))


def paired_attention_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields rows for architectures whose rotary embedding rotates neighbouring
    channels."""
    for row in attention_rows(ours, block, c):
        heads = (c.num_heads, c.num_kv_heads, 0) if row.how == "concat" else ()
        yield replace(row, heads=heads)


def mlp_rows(ours: Path, block: str, c: MLPConfig, ending: str = "") -> Iterator[Row]:
    """Yields the rows of an MLP, whose tensors' names have the given ending ("_shexp"
    for the shared MLP of experts)."""
    yield from _linear(ours, block, {"down": f"ffn_down{ending}"})
    if c.gated:
        both = Row((), (), "concat", (c.d_hidden,) * 2)
        names = f"ffn_gate{ending}", f"ffn_up{ending}"
        yield from _joined(ours, block, "gate_up", names, both)
    else:
        yield from _linear(ours, block, {"up": f"ffn_up{ending}"})


def moe_rows(ours: Path, block: str, c: MoEConfig) -> Iterator[Row]:
    if c.shared is not None:
        yield from mlp_rows((*ours, "shared"), block, c.shared, "_shexp")
    up, gate, down = (f"{block}ffn_{w}_exps.weight" for w in ("up", "gate", "down"))
    into = Row((*ours, "into"), (up,))
    if c.gated:
        into = Row((*ours, "into"), (gate, up), "halves", (c.d_hidden,) * 2)
    yield into
    yield Row((*ours, "down"), (down,))
    yield Row((*ours, "router"), (f"{block}ffn_gate_inp.weight",))
    yield Row((*ours, "router_bias"), (f"{block}exp_probs_b.bias",))
    yield Row((*ours, "latent_in"), (f"{block}ffn_latent_down.weight",))
    yield Row((*ours, "latent_out"), (f"{block}ffn_latent_up.weight",))


HALVES = Names(  # the rotary embedding rotates channels half a head apart, as ours does
    embedding=EMBEDDING,
    norm="output_norm",
    head=HEAD,
    layer="blk.{i}.",
    mixer_norm="attn_norm",
    mlp_norm="ffn_norm",
    parts={
        "mamba": Part("", mamba_rows),
        "attention": Part("", attention_rows),
        "mlp": Part("", mlp_rows),
        "moe": Part("", moe_rows),
    },
)
PAIRS = HALVES.with_parts(attention=Part("", paired_attention_rows))
# In Nemotron-H mixers, MLPs and experts are separate layers.
ALIKE = replace(PAIRS, mlp_norm="attn_norm", numbers_every_layer=True)

# Metadata


def _per_layer(fields: ConfigFields, name: str, default: Any) -> tuple[int, ...]:
    """Reads a size for each layer, from a list or from one number for all layers."""
    count, value = layer_count(fields), fields.get(name, default)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or len(value) != count:
            raise fields.wants(name, f"{count} integers", value)
        value = value.tolist()
    else:
        value = [fields.size(name, default, low=0)] * count
    return tuple(replace(fields, values={name: n}).size(name, low=0) for n in value)


def _one_size(fields: ConfigFields, name: str, default: Any) -> int:
    """Reads a size that must be the same in all layers where it is not 0. Returns 0 if
    it is 0 in all layers."""
    sizes = set(_per_layer(fields, name, default)) - {0}
    if len(sizes) > 1:
        raise fields.error(name, f"layers of different sizes {sorted(sizes)[:4]}")
    return max(sizes, default=0)


def layer_count(fields: ConfigFields) -> int:
    """Returns the number of layers, including MTP layers."""
    return fields.size(BLOCKS, top=MAX_LAYERS)


def further_count(fields: ConfigFields) -> int:
    """Returns the number of multi-token prediction (MTP) layers."""
    name, count = "nextn_predict_layers", layer_count(fields)
    return fields.size(name, 0, low=0, top=count - 1)


def _optional(fields: ConfigFields, name: str, default: Any) -> float | None:
    """Reads a positive number. 0 or absent means None, the default."""
    value = fields.number(name, 0.0)
    return fields.positive(name) if value else None


def _scale(fields: ConfigFields, name: str, default: Any) -> float:
    value = _optional(fields, name, None)
    return 1.0 if value is None else value


SIZES = (
    Field("embedding_length", "d_model", read.size),
    Field("attention.layer_norm_rms_epsilon", "norm_eps", read.positive),
)
SCALES = (  # Granite's multipliers
    Field("embedding_scale", "embedding_multiplier", _scale),
    Field("residual_scale", "residual_multiplier", _scale),
    Field("logit_scale", "logits_divisor", _scale),
)
HEADS = Field("attention.head_count", "num_heads", read.size)


def _kv_heads(fields: ConfigFields, name: str, default: Any) -> int:
    heads = HEADS.value(fields)
    parts = _one_size(fields, name, heads) or heads
    fields.divide(name, heads, parts)
    return parts


def _head_dim(fields: ConfigFields, name: str, default: Any) -> int:
    width = fields.size("embedding_length")
    usual = width // HEADS.value(fields)
    size = fields.size(name, usual)
    if (values := fields.size(VALUE_LENGTH, size)) != size:
        raise fields.error(VALUE_LENGTH, f"{values} is not {name} {size}")
    return size


ATTENTION = (
    HEADS,
    Field(KV_HEADS, "num_kv_heads", _kv_heads),
    Field("attention.key_length", "head_dim", _head_dim),
    Field("", "qkv_bias", read.tensor("attn_q.bias")),
    Field("", "out_bias", read.tensor("attn_output.bias")),
)
SOFTMAX_SCALE = Field("attention.scale", "scale", _optional)
MAMBA_HEADS = Field("ssm.time_step_rank", "num_heads", read.size)
MAMBA = (
    MAMBA_HEADS,
    Field("ssm.group_count", "n_groups", read.divisor(MAMBA_HEADS)),
    Field("ssm.state_size", "d_state", read.size),
    Field("ssm.conv_kernel", "d_conv", read.size),
    Field("", "proj_in_bias", read.tensor("ssm_in.bias")),
    Field("", "proj_out_bias", read.tensor("ssm_out.bias")),
    Field("", "conv_bias", read.tensor("ssm_conv1d.bias")),
)
MLP = (
    Field(FEED_FORWARD, "d_hidden", _one_size),
    Field("", "bias", read.tensor("ffn_down.bias")),
)


def _expert_width(fields: ConfigFields, name: str, default: Any) -> int:
    if name in fields.values:
        return fields.size(name)
    return _one_size(fields, FEED_FORWARD, default)


SHARED = (
    Field("expert_shared_feed_forward_length", "d_hidden", read.size),
    Field("", "bias", read.tensor("ffn_down_shexp.bias")),
)


def _experts(fields: ConfigFields, name: str, default: Any) -> int:
    return fields.size(name, top=MAX_EXPERTS)


MOE = (
    Field("expert_count", "num_experts", _experts),
    Field("expert_used_count", "top_k", read.size),
    Field("expert_feed_forward_length", "d_hidden", _expert_width),
)
SIGMOID_MOE = (
    *MOE,
    Field("moe_latent_size", "d_latent", read.count, 0),
    Field("expert_group_count", "groups", read.size, 1),
    Field("expert_weights_norm", "normalize", read.flag, False),
    Field("expert_weights_scale", "scale", _scale),
)


def _model(fields: ConfigFields, *more: Field) -> dict[str, Any]:
    """Reads the options of the whole model."""
    shape = fields.tensors[f"{EMBEDDING}.weight"].shape
    return {
        "vocab_size": shape[0],
        "num_tokens": shape[0],
        "tie_embeddings": f"{HEAD}.weight" not in fields.tensors,
        **read_fields((*SIZES, *more), fields),
    }


def check_neutral(fields: ConfigFields, known: tuple[str, ...]) -> None:
    """Raises CheckpointError if an unsupported key would change the model's results.

    Args:
      fields: the metadata.
      known: keys of `NEUTRAL` that the architecture's parser reads.
    """
    for name in NEUTRAL.keys() - set(known):
        value = fields.get(name, NEUTRAL[name][0])
        if isinstance(value, np.ndarray) or value not in NEUTRAL[name]:
            raise fields.error(name, f"{value!r:.60} is not supported")


def _attention(fields: ConfigFields, *more: Field) -> AttentionConfig:
    return AttentionConfig(**read_fields((*ATTENTION, *more), fields))


def _mamba(fields: ConfigFields, eps: float) -> MambaConfig:
    values = read_fields(MAMBA, fields)
    inner = fields.size(INNER)
    head_dim = fields.divide(INNER, inner, values["num_heads"])
    groups = values["n_groups"]
    fields.divide(INNER, inner, groups)
    return MambaConfig(**values, head_dim=head_dim, norm_groups=groups, norm_eps=eps)


def _mlp(fields: ConfigFields) -> MLPConfig:
    return MLPConfig(**read_fields(MLP, fields))


def _all(fields: ConfigFields, kind: str) -> Layers:
    return (kind,) * layer_count(fields)


def _llama(fields: ConfigFields) -> ModelConfig:
    attention = _attention(fields)
    mixers = _all(fields, "attention")
    return ModelConfig(
        **_model(fields),
        layers=blocks(with_mlps(mixers)),
        mixers=named(
            attention=replace(attention, rope=rope(fields, attention.head_dim)),
            mlp=_mlp(fields),
        ),
    )


def _qwen3(fields: ConfigFields) -> ModelConfig:
    """Parses a llama with norms of q and k."""
    config = _llama(fields)
    attention = replace(config.mixers["attention"], qk_norm_eps=config.norm_eps)
    return config.with_mixers(attention=attention)


def _mamba2(fields: ConfigFields) -> ModelConfig:
    model = _model(fields)
    mamba = _mamba(fields, model["norm_eps"])
    layers = _all(fields, "mamba")
    return ModelConfig(
        **model,
        layers=blocks(layers),
        mixers=named(mamba=mamba),
    )


def _granite(fields: ConfigFields) -> ModelConfig:
    """Parses Granite, with or without Mamba2 layers (those without KV heads) and with
    or without experts."""
    model = _model(fields, *SCALES)
    heads = _per_layer(fields, KV_HEADS, HEADS.value(fields))
    kinds: list[str] = ["attention" if n else "mamba" for n in heads]
    mixers = tuple(kinds)
    attention = mamba = mlp = moe = None
    if "attention" in mixers:
        attention = _attention(fields, SOFTMAX_SCALE)
        if fields.flag(ROTATES, True):
            attention = replace(attention, rope=rope(fields, attention.head_dim))
    if "mamba" in mixers:
        mamba = _mamba(fields, model["norm_eps"])
    if fields.size("expert_count", 0, low=0):
        shared = None
        if fields.size(SHARED[0].name, 0, low=0):
            shared = MLPConfig(**read_fields(SHARED, fields))
        moe = MoEConfig(**read_fields(MOE, fields), shared=shared)
    else:
        mlp = _mlp(fields)
    return ModelConfig(
        **model,
        layers=blocks(with_mlps(mixers, "mlp" if moe is None else "moe")),
        mixers=named(mamba=mamba, attention=attention, mlp=mlp, moe=moe),
    )


def _falcon_h1(fields: ConfigFields) -> ModelConfig:
    model, attention = _model(fields), _attention(fields)
    mamba = _mamba(fields, model["norm_eps"])
    if not fields.has_tensor("ssm_norm.weight"):
        mamba = replace(mamba, norm=None)
    mixers = _all(fields, "mamba+attention")
    return ModelConfig(
        **model,
        layers=blocks(with_mlps(mixers)),
        mixers=named(
            mamba=mamba,
            attention=replace(attention, rope=rope(fields, attention.head_dim)),
            mlp=_mlp(fields),
        ),
    )


def _nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Parses Nemotron-H. A layer with KV heads is attention (without a rotary
    embedding), one with a feed-forward width is an MLP or experts, and all others are
    Mamba2."""
    model = _model(fields)
    experts = fields.size("expert_count", 0, low=0) > 0
    second: str = "moe" if experts else "mlp"
    sizes = zip(
        _per_layer(fields, KV_HEADS, 0),
        _per_layer(fields, FEED_FORWARD, 0),
        strict=True,
    )
    kinds: list[str] = [
        "attention" if heads else second if width else "mamba" for heads, width in sizes
    ]
    layers = tuple(kinds[: len(kinds) - further_count(fields)])
    form: dict[str, Any] = {"gated": False, "activation": "relu2"}
    moe = None
    if "moe" in layers:
        fields.choice(GATING, 0, (0, SIGMOID))
        shared = MLPConfig(**read_fields(SHARED, fields), **form)
        options = read_fields(SIGMOID_MOE, fields)
        best = fields.size("expert_group_used_count", *[1] * (options["groups"] == 1))
        moe = MoEConfig(
            **options, top_groups=best, shared=shared, router="sigmoid", **form
        )
    mamba = _mamba(fields, model["norm_eps"]) if "mamba" in layers else None
    return ModelConfig(
        **model,
        layers=blocks(layers),
        mixers=named(
            mamba=mamba,
            attention=_attention(fields) if "attention" in layers else None,
            mlp=replace(_mlp(fields), **form) if "mlp" in layers else None,
            moe=moe,
        ),
    )


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
      names: names of the tensors.
      parse: converts the metadata to our config.
      known: keys of `NEUTRAL` that `parse` reads.
    """

    names: Names
    parse: Callable[[ConfigFields], ModelConfig]
    known: tuple[str, ...] = ()


GRANITE = Architecture(
    PAIRS,
    _granite,
    ("expert_count", SOFTMAX_SCALE.name, *(field.name for field in SCALES)),
)
SIGMOID_KEYS = ("expert_count", GATING, "expert_weights_scale")
ARCHITECTURES = {
    "llama": Architecture(PAIRS, _llama),
    "qwen2": Architecture(HALVES, _llama),
    "qwen3": Architecture(HALVES, _qwen3),
    "mamba2": Architecture(HALVES, _mamba2),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "falcon-h1": Architecture(HALVES, _falcon_h1),
    "nemotron_h": Architecture(ALIKE, _nemotron_h),
    "nemotron_h_moe": Architecture(ALIKE, _nemotron_h, SIGMOID_KEYS),
}
