"""Reads and writes the metadata keys that several of llama.cpp's architectures share.

Key names are given without their prefix, which is the architecture's name.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.convert.families import read
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.gguf.names import EMBEDDING, HEAD
from stree_jax.convert.tensors.fields import MAX_EXPERTS, ConfigFields
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.stack.config_json import MAX_LAYERS

BLOCKS, KV_HEADS = "block_count", "attention.head_count_kv"
CONTEXT_LENGTH, VOCAB_SIZE = "context_length", "vocab_size"
MTP_COUNT = "nextn_predict_layers"  # these are the last ones of the layers
FEED_FORWARD = "feed_forward_length"
INNER = "ssm.inner_size"
VALUE_LENGTH = "attention.value_length"  # size of a head's values, as of its keys
WINDOW = "attention.sliding_window"
ROTATES = "rope.scaling.finetuned"  # true if Granite's attention has a rotary embedding
# The router's function of the logits. 0 means the architecture's default.
GATING, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2
# Keys that would change the model's results and are not supported, with the values that
# have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    WINDOW: (0,),
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


def per_layer(fields: ConfigFields, name: str, default: Any) -> tuple[int, ...]:
    """Reads a size for each layer, from a list or from one number for all layers."""
    count, value = layer_count(fields), fields.get(name, default)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or len(value) != count:
            raise fields.wants(name, f"{count} integers", value)
        value = value.tolist()
    else:
        value = [fields.size(name, default, low=0)] * count
    return tuple(replace(fields, values={name: n}).size(name, low=0) for n in value)


def one_size(fields: ConfigFields, name: str, default: Any) -> int:
    """Reads a size that the file stores as one number per layer.

    The numbers that are not 0 must be equal. Returns this number, or 0 if all are 0.
    """
    sizes = set(per_layer(fields, name, default)) - {0}
    if len(sizes) > 1:
        raise fields.error(name, f"layers of different sizes {sorted(sizes)[:4]}")
    return max(sizes, default=0)


def layer_count(fields: ConfigFields) -> int:
    """Returns the number of layers, including MTP layers."""
    return fields.size(BLOCKS, top=MAX_LAYERS)


def further_count(fields: ConfigFields) -> int:
    """Returns the number of multi-token prediction (MTP) layers."""
    return fields.size(MTP_COUNT, 0, low=0, top=layer_count(fields) - 1)


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
    parts = one_size(fields, name, heads) or heads
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
    Field(FEED_FORWARD, "d_hidden", one_size),
    Field("", "bias", read.tensor("ffn_down.bias")),
)


def _expert_width(fields: ConfigFields, name: str, default: Any) -> int:
    if name in fields.values:
        return fields.size(name)
    return one_size(fields, FEED_FORWARD, default)


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


def model_options(fields: ConfigFields, *more: Field) -> dict[str, Any]:
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


def ignored_keys(fields: ConfigFields, names: Collection[str]) -> Iterator[str]:
    """Yields a warning for each of these keys of `NEUTRAL` that is not neutral."""
    for name in names:
        value = fields.get(name, NEUTRAL[name][0])
        if isinstance(value, np.ndarray) or value not in NEUTRAL[name]:
            said = f"{value!r:.60} has no effect, as in llama.cpp"
            yield str(fields.error(name, said))


def attention_config(fields: ConfigFields, *more: Field) -> AttentionConfig:
    return AttentionConfig(**read_fields((*ATTENTION, *more), fields))


def mlp_config(fields: ConfigFields) -> MLPConfig:
    return MLPConfig(**read_fields(MLP, fields))


def second_mixer(fields: ConfigFields) -> dict[str, MLPConfig | MoEConfig]:
    """Returns what follows the token mixer of every layer, by its name: an MLP, or
    experts whose shared MLP has no gate."""
    if not fields.size("expert_count", 0, low=0):
        return {"mlp": mlp_config(fields)}
    shared = None
    if fields.size(SHARED[0].name, 0, low=0):
        shared = MLPConfig(**read_fields(SHARED, fields))
    return {"moe": MoEConfig(**read_fields(MOE, fields), shared=shared)}


# Writing


def second_values(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the MLP or the experts after each token mixer; the inverse of
    `second_mixer`."""
    moe = config.mixers.get("moe")
    if moe is None:
        return values_of(MLP, config.mixers["mlp"])
    shared = {} if moe.shared is None else values_of(SHARED, moe.shared)
    return {FEED_FORWARD: moe.d_hidden, **values_of(MOE, moe), **shared}


def values_of(table: Sequence[Field], part: Any) -> dict[str, Any]:
    """Returns the values of a table's keys: the inverse of `table.read_fields`.

    An attribute that is None has no key. Whether the keys describe the whole config is
    checked afterwards, by reading them (`writing.architecture_for`).

    Args:
      table: the table.
      part: our config, which has the table's attributes.
    """
    pairs = ((row, getattr(part, row.attribute)) for row in table if row.name)
    return {row.name: row.write(value) for row, value in pairs if value is not None}


def model_values(config: ModelConfig, *more: Field) -> dict[str, Any]:
    """Returns the keys of the whole model; `more` as in `model_options`."""
    blocks = len(mixers_of(config)) + len(config.mtp) // 2
    sizes = values_of((*SIZES, *more), config)
    return {VOCAB_SIZE: config.vocab_size, BLOCKS: blocks, **sizes}


def attention_values(c: AttentionConfig, *more: Field) -> dict[str, Any]:
    return values_of((*ATTENTION, *more), c) | {VALUE_LENGTH: c.head_dim}


def mamba_values(c: MambaConfig) -> dict[str, Any]:
    return values_of(MAMBA, c) | {INNER: c.d_inner}


def mixers_of(config: ModelConfig) -> list[str]:
    """Returns the token mixer of each layer of a model that has an MLP or experts after
    each mixer, and all layers of a model without MLPs."""
    kinds = [block.mixers[0] for block in config.layers]
    return kinds[::2] if {"mlp", "moe"} & set(kinds) else kinds


def second_of(config: ModelConfig) -> list[str]:
    """Returns the mixer after each token mixer: "mlp" or "moe"."""
    return [block.mixers[0] for block in config.layers[1::2]]


def where(kinds: Sequence[str], name: str, value: int = 1) -> np.ndarray:
    """Returns `value` for layers with this mixer, and 0 for others, [layers] int32."""
    return np.array([value * (kind == name) for kind in kinds], np.int32)
