"""Converts the metadata of llama.cpp's architectures to our configs.

The files have no limits of dt, which Hugging Face directories may have.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from stree_jax.convert.families.huggingface import Layers, with_mlps
from stree_jax.convert.families.table import read_fields
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.gguf import by_layer, gemma, gemma4, kimi, lfm2, mamba, qwen
from stree_jax.convert.gguf.keys import (
    FEED_FORWARD,
    GATING,
    HEADS,
    INNER,
    KV_HEADS,
    MAMBA,
    ROTATES,
    SCALES,
    SHARED,
    SIGMOID,
    SIGMOID_MOE,
    SOFTMAX_SCALE,
    WINDOW,
    attention_config,
    further_count,
    layer_count,
    mlp_config,
    model_options,
    per_layer,
    second_mixer,
)
from stree_jax.convert.gguf.names import ALIKE, HALVES, PAIRS
from stree_jax.convert.gguf.rotary import rope
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.stack.config import blocks, named


def _mamba(fields: ConfigFields, eps: float) -> MambaConfig:
    values = read_fields(MAMBA, fields)
    inner = fields.size(INNER)
    head_dim = fields.divide(INNER, inner, values["num_heads"])
    groups = values["n_groups"]
    fields.divide(INNER, inner, groups)
    return MambaConfig(**values, head_dim=head_dim, norm_groups=groups, norm_eps=eps)


def _all(fields: ConfigFields, kind: str) -> Layers:
    return (kind,) * layer_count(fields)


def _llama(fields: ConfigFields) -> ModelConfig:
    attention = attention_config(fields)
    mixers, second = _all(fields, "attention"), second_mixer(fields)
    return ModelConfig(
        **model_options(fields),
        layers=blocks(with_mlps(mixers, *second)),
        mixers=named(
            attention=replace(attention, rope=rope(fields, attention.head_dim)),
            **second,
        ),
    )


def _qwen3(fields: ConfigFields) -> ModelConfig:
    """Parses a llama with norms of q and k, and with experts in files of "qwen3moe".
    Their weights add up to 1, as in llama.cpp."""
    config = _llama(fields)
    attention = replace(config.mixers["attention"], qk_norm_eps=config.norm_eps)
    return config.with_mixers(attention=attention)


def _mamba2(fields: ConfigFields) -> ModelConfig:
    model = model_options(fields)
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
    model = model_options(fields, *SCALES)
    heads = per_layer(fields, KV_HEADS, HEADS.value(fields))
    kinds: list[str] = ["attention" if n else "mamba" for n in heads]
    mixers = tuple(kinds)
    attention = mamba = None
    if "attention" in mixers:
        attention = attention_config(fields, SOFTMAX_SCALE)
        if fields.flag(ROTATES, True):
            attention = replace(attention, rope=rope(fields, attention.head_dim))
    if "mamba" in mixers:
        mamba = _mamba(fields, model["norm_eps"])
    second = second_mixer(fields)
    return ModelConfig(
        **model,
        layers=blocks(with_mlps(mixers, *second)),
        mixers=named(mamba=mamba, attention=attention, **second),
    )


def _falcon_h1(fields: ConfigFields) -> ModelConfig:
    model, attention = model_options(fields), attention_config(fields)
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
            mlp=mlp_config(fields),
        ),
    )


def _nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Parses Nemotron-H. A layer with KV heads is attention (without a rotary
    embedding), one with a feed-forward width is an MLP or experts, and all others are
    Mamba2."""
    model = model_options(fields)
    experts = fields.size("expert_count", 0, low=0) > 0
    second: str = "moe" if experts else "mlp"
    sizes = zip(
        per_layer(fields, KV_HEADS, 0),
        per_layer(fields, FEED_FORWARD, 0),
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
            attention=attention_config(fields) if "attention" in layers else None,
            mlp=replace(mlp_config(fields), **form) if "mlp" in layers else None,
            moe=moe,
        ),
    )


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
      names: names of the tensors.
      parse: converts the metadata to our config, without MTP layers.
      known: keys of `NEUTRAL` that `parse` reads.
      names_in: function (names of a file's tensors) that returns the names which the
        file uses, if the architecture has several. If None, they are `names`.
      add_mtp: function (metadata, config) that returns the config with the MTP layers
        that the file has. If None, MTP layers are not supported.
      ignored: keys of `NEUTRAL` that llama.cpp ignores for this architecture. They have
        no effect here, either, except for a warning.
    """

    names: Names
    parse: Callable[[ConfigFields], ModelConfig]
    known: tuple[str, ...] = ()
    names_in: Callable[[Collection[str]], Names] | None = None
    add_mtp: Callable[[ConfigFields, ModelConfig], ModelConfig] | None = None
    ignored: tuple[str, ...] = ()


def _hybrid(names_in: Callable[[Collection[str]], Names]) -> Architecture:
    """Returns an architecture of `qwen`."""
    known = ("expert_count",)
    return Architecture(names_in(()), qwen.parse, known, names_in, qwen.add_mtp)


GRANITE = Architecture(
    PAIRS,
    _granite,
    ("expert_count", SOFTMAX_SCALE.name, *(field.name for field in SCALES)),
)
SIGMOID_KEYS = ("expert_count", GATING, "expert_weights_scale")
ARCHITECTURES = {
    "llama": Architecture(PAIRS, _llama, ignored=(WINDOW,)),
    "qwen2": Architecture(HALVES, _llama, ignored=(WINDOW,)),
    "qwen3": Architecture(HALVES, _qwen3, ignored=(WINDOW,)),
    "qwen3moe": Architecture(HALVES, _qwen3, ("expert_count",), ignored=(WINDOW,)),
    "smollm3": Architecture(PAIRS, by_layer.parse_smollm3, ignored=(WINDOW,)),
    "olmo2": Architecture(
        by_layer.OLMO_NAMES, by_layer.parse_olmo2, by_layer.OLMO_KEYS
    ),
    "mistral3": Architecture(PAIRS, by_layer.parse_mistral3, by_layer.MISTRAL_KEYS),
    "granite_swa": Architecture(
        by_layer.GRANITE_NAMES, by_layer.parse_granite_swa, by_layer.GRANITE_KEYS
    ),
    "qwen3next": _hybrid(qwen.names),
    "qwen35": _hybrid(qwen.tiled_names),
    "qwen35moe": _hybrid(qwen.tiled_names),
    "mamba": Architecture(mamba.NAMES, mamba.parse, (mamba.NORMED,)),
    "jamba": Architecture(mamba.NAMES, mamba.parse_jamba, ("expert_count",)),
    "mamba2": Architecture(HALVES, _mamba2),
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "falcon-h1": Architecture(HALVES, _falcon_h1),
    "gemma3": Architecture(gemma.NAMES, gemma.parse, gemma.KEYS),
    "gemma4": Architecture(gemma4.NAMES, gemma4.parse, gemma4.KEYS, gemma4.names),
    "kimi-linear": Architecture(kimi.NAMES, kimi.parse, kimi.KEYS, kimi.names),
    "lfm2": Architecture(lfm2.NAMES, lfm2.parse),
    "lfm2moe": Architecture(
        lfm2.NAMES, lfm2.parse, ("expert_count", GATING, lfm2.DENSE)
    ),
    "nemotron_h": Architecture(ALIKE, _nemotron_h),
    "nemotron_h_moe": Architecture(ALIKE, _nemotron_h, SIGMOID_KEYS),
}
