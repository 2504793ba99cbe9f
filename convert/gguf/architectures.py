"""Converts the metadata of llama.cpp's architectures to our configs and back.

The files have no limits of dt, which Hugging Face directories may have.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stree_jax.convert.families.huggingface import Layers, with_mlps
from stree_jax.convert.families.table import read_fields
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.families.windows import NEAR
from stree_jax.convert.gguf import by_layer, gemma, gemma4, kimi, lfm2, mamba, qwen
from stree_jax.convert.gguf.keys import (
    BLOCKS,
    FEED_FORWARD,
    GATING,
    HEADS,
    INNER,
    KV_HEADS,
    MAMBA,
    MLP,
    MOE,
    ROTATES,
    SCALES,
    SHARED,
    SIGMOID,
    SIGMOID_MOE,
    SOFTMAX_SCALE,
    WINDOW,
    attention_config,
    attention_values,
    further_count,
    layer_count,
    mamba_values,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    per_layer,
    second_mixer,
    second_values,
    values_of,
    where,
)
from stree_jax.convert.gguf.names import ALIKE, HALVES, PAIRS
from stree_jax.convert.gguf.rotary import rope, rope_values
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from stree_jax.models.stack.config import blocks, named

LAYER_NORM_EPS = "attention.layer_norm_epsilon"  # wanted by llama.cpp's Nemotron-H
SHARED_COUNT, BEST_GROUPS = "expert_shared_count", "expert_group_used_count"


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
        best = fields.size(BEST_GROUPS, *[1] * (options["groups"] == 1))
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


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    c = config.mixers["attention"]
    values = model_values(config) | attention_values(c) | rope_values(c.rope)
    return values | second_values(config)


def _write_mamba2(config: ModelConfig) -> dict[str, Any]:
    values = model_values(config) | mamba_values(config.mixers["mamba"])
    return values | {FEED_FORWARD: 0, HEADS.name: 0}


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    mamba, c, mlp, moe = (
        config.mixers.get(name) for name in ("mamba", "attention", "mlp", "moe")
    )
    assert c is not None  # of `Architecture.layers`
    values = model_values(config, *SCALES) | attention_values(c, SOFTMAX_SCALE)
    values |= rope_values(c.rope) | {ROTATES: c.rope is not None}
    if mamba is not None:
        values |= mamba_values(mamba)
        values[KV_HEADS] = where(mixers_of(config), "attention", c.num_kv_heads)
    if mlp is not None:
        values |= values_of(MLP, mlp)
    if moe is not None:
        values |= values_of(MOE[:2], moe) | {FEED_FORWARD: moe.d_hidden}
        if moe.shared is not None:
            values |= values_of(SHARED, moe.shared)
    return values


def _write_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    return _write_llama(config) | mamba_values(config.mixers["mamba"])


def _write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    mamba, c, mlp, moe = (
        config.mixers.get(name) for name in ("mamba", "attention", "mlp", "moe")
    )
    kinds = list(config.kinds)
    values = model_values(config) | {BLOCKS: len(kinds)}
    values[LAYER_NORM_EPS] = config.norm_eps
    if mamba is not None:
        values |= mamba_values(mamba)
    if c is not None:
        values |= attention_values(c)
        values[KV_HEADS] = where(kinds, "attention", c.num_kv_heads)
    if mlp is not None:
        values[FEED_FORWARD] = where(kinds, "mlp", mlp.d_hidden)
    if moe is not None:
        values |= values_of(SIGMOID_MOE, moe) | values_of(SHARED, moe.shared)
        values |= {FEED_FORWARD: where(kinds, "moe", moe.d_hidden), SHARED_COUNT: 1}
        values |= {BEST_GROUPS: moe.top_groups} if moe.groups > 1 else {}
    return values


def _twice(config: ModelConfig) -> dict[str, bool]:
    """Returns whether Mamba layers are as wide as llama.cpp wants them."""
    mixers = [m for name, m in config.mixers.items() if name in ("mamba", "mamba1")]
    fits = all(mixer.d_inner == 2 * config.d_model for mixer in mixers)
    return {"Mamba layers that are not twice as wide as the model": fits}


def _square(config: ModelConfig) -> dict[str, bool]:
    """Returns whether the delta rule's states are as llama.cpp wants them."""
    d = config.mixers["delta"]
    return {"delta-rule heads of two sizes": d.key_dim == d.value_dim}


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
      write: converts our config, including MTP layers, to the metadata: the inverse of
        `parse` and `add_mtp`.
      layers, optional: kinds of layers that a model must have, and those that it may
        also have, to be written as this architecture; separated by spaces.
      limits: function (config) that returns what llama.cpp can run only in part, each
        with whether this model can be run; see `table.require`.
      folds: True if the model's multipliers are multiplied into the weights of a file.
    """

    names: Names
    parse: Callable[[ConfigFields], ModelConfig]
    known: tuple[str, ...] = ()
    names_in: Callable[[Collection[str]], Names] | None = None
    add_mtp: Callable[[ConfigFields, ModelConfig], ModelConfig] | None = None
    ignored: tuple[str, ...] = ()
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    layers: str = ""
    optional: str = ""
    limits: Callable[[ModelConfig], Mapping[str, bool]] | None = None
    folds: bool = False

    def may_write(self, config: ModelConfig) -> bool:
        """True if the architecture has the model's kinds of layers."""
        needed, found = set(self.layers.split()), set(config.kinds)
        return needed <= found <= needed | set(self.optional.split())

    def written_names(self, config: ModelConfig) -> Names:
        """Returns the names for a new file. An MTP layer has its own final norm."""
        if self.names_in is None or not config.mtp:
            return self.names
        block = self.names.layer.format(i=len(config.layers) // 2)
        return self.names_in((f"{block}{qwen.MTP_NORM}.weight",))


def _attends(
    names: Names,
    parse: Callable[[ConfigFields], ModelConfig],
    layers: str = "attention mlp",
    known: tuple[str, ...] = (),
) -> Architecture:
    """Returns an architecture with attention, and with MLPs or experts."""
    return Architecture(
        names, parse, known, ignored=(WINDOW,), write=_write_llama, layers=layers
    )


def _hybrid(
    names_in: Callable[[Collection[str]], Names], layers: str, optional: str = ""
) -> Architecture:
    """Returns an architecture of `qwen`."""
    return Architecture(
        *(names_in(()), qwen.parse, ("expert_count",), names_in, qwen.add_mtp),
        write=qwen.write,
        layers=layers,
        optional=optional,
        limits=_square,
    )


GRANITE = Architecture(
    PAIRS,
    _granite,
    ("expert_count", SOFTMAX_SCALE.name, *(field.name for field in SCALES)),
    write=_write_granite,
)
LFM2 = Architecture(lfm2.NAMES, lfm2.parse, write=lfm2.write)
SIGMOID_KEYS = ("expert_count", GATING, "expert_weights_scale")
NEMOTRON_H = Architecture(ALIKE, _nemotron_h, write=_write_nemotron_h)
# Where several can express a model, the first one is written.
ARCHITECTURES = {
    "llama": _attends(PAIRS, _llama),
    "qwen2": _attends(HALVES, _llama),
    "qwen3": _attends(HALVES, _qwen3),
    "qwen3moe": _attends(HALVES, _qwen3, "attention moe", ("expert_count",)),
    "smollm3": _attends(PAIRS, by_layer.parse_smollm3, "attention attention_nope mlp"),
    "olmo2": Architecture(
        by_layer.OLMO_NAMES,
        by_layer.parse_olmo2,
        by_layer.OLMO_KEYS,
        write=by_layer.write_olmo2,
        layers="after:mlp",
        optional=f"after:attention after:{NEAR}",
    ),
    "mistral3": Architecture(
        PAIRS,
        by_layer.parse_mistral3,
        by_layer.MISTRAL_KEYS,
        write=by_layer.write_mistral3,
        layers="attention mlp",
    ),
    "granite_swa": Architecture(
        by_layer.GRANITE_NAMES,
        by_layer.parse_granite_swa,
        by_layer.GRANITE_KEYS,
        write=by_layer.write_granite_swa,
        layers=NEAR,
        optional=f"attention attention_nope {NEAR}_nope mlp moe",
    ),
    "gemma4": Architecture(
        gemma4.NAMES,
        gemma4.parse,
        gemma4.KEYS,
        gemma4.names,
        write=gemma4.write,
        layers="both:attention",
        optional=gemma4.LAYERS,
    ),
    "qwen35": _hybrid(qwen.tiled_names, "delta attention mlp"),
    "qwen35moe": _hybrid(qwen.tiled_names, "delta attention moe"),
    "qwen3next": _hybrid(qwen.names, "delta attention", "mlp moe"),
    "mamba": Architecture(
        mamba.NAMES,
        mamba.parse,
        (mamba.NORMED,),
        write=mamba.write,
        layers="mamba1",
        limits=_twice,
    ),
    "jamba": Architecture(
        mamba.NAMES,
        mamba.parse_jamba,
        ("expert_count",),
        write=mamba.write_jamba,
        layers="mamba1 attention",
        optional="mlp moe",
        limits=_twice,
    ),
    "mamba2": Architecture(HALVES, _mamba2, write=_write_mamba2, layers="mamba"),
    "granite": replace(GRANITE, layers="attention mlp"),
    "granitemoe": replace(GRANITE, layers="attention moe"),
    "granitehybrid": replace(
        GRANITE, layers="mamba attention", optional="mlp moe", limits=_twice
    ),
    "falcon-h1": Architecture(
        HALVES,
        _falcon_h1,
        write=_write_falcon_h1,
        layers="mamba+attention mlp",
        folds=True,
    ),
    "gemma3": Architecture(
        gemma.NAMES,
        gemma.parse,
        gemma.KEYS,
        write=gemma.write,
        layers="both:attention both:mlp",
        optional=f"both:{NEAR}",
    ),
    "kimi-linear": Architecture(
        kimi.NAMES,
        kimi.parse,
        kimi.KEYS,
        kimi.names,
        write=kimi.write,
        layers="kda mla",
        optional="mlp moe",
    ),
    "lfm2": replace(LFM2, layers="short_conv attention mlp"),
    "lfm2moe": replace(
        LFM2,
        known=("expert_count", GATING, lfm2.DENSE),
        layers="short_conv attention moe",
        optional="mlp",
    ),
    "nemotron_h": replace(NEMOTRON_H, layers="mamba", optional="attention mlp"),
    "nemotron_h_moe": replace(
        NEMOTRON_H, known=SIGMOID_KEYS, layers="mamba moe", optional="attention"
    ),
}
