"""Lfm3ForCausalLM (LFM3 of Liquid AI): the layers of `lfm2`, where attention has a
sliding window on some layers and a gate for each head, with norms before and after
every mixer and MLP.

Layers without a window rotate only the fastest half of the channels of a head.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import lfm2, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names, Part, Path, Row, attention_rows
from stree_jax.convert.families.windows import (
    NEAR,
    SLIDES,
    WINDOW,
    effective,
    typed_rope,
    typed_rope_fields,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, ShortConvConfig
from stree_jax.models.configs.rope import Rope
from stree_jax.models.stack.config import Block, named

FORMAT = "lfm3"
MODELS = "LFM3: short convolutions, attention with and without a window"
FULL = "full_attention"
KINDS: dict[str, str] = {**lfm2.KINDS, SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
LONGEST = 128000  # default of `max_position_embeddings`
THETA = 1e6
PARTIAL = "partial_rotary_factor"
ROPES: dict[str, dict[str, Any]] = {  # defaults by type of layers
    FULL: {"rope_type": "proportional", "rope_theta": THETA, PARTIAL: 0.5},
    SLIDES: {"rope_type": "default", "rope_theta": 1e4},
}
GATE, SANDWICH = "use_attention_gate", "use_sandwich_norm"


def gated_rows(
    ours: Path, theirs: str, c: AttentionConfig, gate: str = "gate_proj"
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with a gate for each head. `gate`
    is the name of the gate's module."""
    for row in attention_rows(ours, theirs, c):
        if c.gated and row.path[-1] == "qkv":
            sources = (f"{theirs}.{gate}.weight", *row.sources)
            row = replace(row, sources=sources, sizes=(c.d_gate, *row.sizes))
        yield row


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    if not any(".self_attn.g_proj." in name for name in tensors):
        return names
    part = Part("self_attn", partial(gated_rows, gate="g_proj"))
    return names.with_parts(**dict.fromkeys(("attention", NEAR), part))


NAMES = replace(
    lfm2.NAMES.with_parts(
        **dict.fromkeys(("attention", NEAR), Part("self_attn", gated_rows))
    ),
    norm_after_mixer="post_operator_norm",
    norm_after_mlp="post_ffn_norm",
    spelling=spelled,
)

MODEL = hf.model_table("norm_eps", 1e-5, 2048, True)
HEADS = Field("num_attention_heads", "num_heads", read.size, 16)
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4),
    Field("head_dim", "head_dim", read.size, 128),
    *hf.BIASES,
    Field(GATE, "gated", read.flag, True),
)
CONV = (
    Field("conv_L_cache", "d_conv", read.size, 7),
    Field("conv_bias", "bias", read.flag, False),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 7680),)


def renamed(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the name `norm_eps` for the epsilon of the norms. If a
    config also has `rms_norm_eps`, that value is used, as in transformers."""
    values = dict(fields.values)
    if "rms_norm_eps" in values:
        values["norm_eps"] = values.pop("rms_norm_eps")
    return replace(fields, values=values)


def parse(fields: ConfigFields) -> ModelConfig:
    fields = renamed(fields)
    model, kinds = hf.read_model(MODEL, fields, NAMES), _mixers(fields)
    mixers: dict[str, Any] = {"mlp": MLPConfig(**read_fields(MLP, fields))}
    if "short_conv" in kinds:
        channels = model["d_model"]
        conv = ShortConvConfig(channels=channels, **read_fields(CONV, fields))
        mixers["short_conv"] = conv
    c = AttentionConfig(**read_fields(ATTENTION, fields))
    if c.gated and c.qkv_bias:
        raise fields.error("attention_bias", f"beside {GATE} is not supported")
    c = replace(c, qk_norm_eps=model["norm_eps"], gate_by_head=c.gated)
    if "attention" in kinds:
        mixers["attention"] = replace(c, rope=_rope(fields, FULL, c))
    if NEAR in kinds:
        window = effective(fields, fields.size(WINDOW, 256), LONGEST)
        mixers[NEAR] = replace(c, rope=_rope(fields, SLIDES, c), window=window)
    norms: Any = "both" if fields.flag(SANDWICH, True) else "before"
    layers = [Block((kind,), norms=norms) for kind in hf.with_mlps(kinds)]
    return ModelConfig(**model, layers=tuple(layers), mixers=named(**mixers))


def _mixers(fields: ConfigFields) -> hf.Layers:
    count = fields.size("num_hidden_layers", 24)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    usual = {2: "attention", 0: NEAR}
    after = (usual.get(i % 4, "short_conv") for i in range(1, count))
    return ("short_conv", *after)


def _rope(fields: ConfigFields, kind: str, c: AttentionConfig) -> Rope:
    return typed_rope(fields, kind, c.head_dim, THETA, ROPES[kind])


def export(config: ModelConfig) -> dict[str, Any]:
    kinds = [block.mixers[0] for block in config.layers[::2]]
    conv, far, near = (
        config.mixers.get(name) for name in ("short_conv", "attention", NEAR)
    )
    windows = not getattr(far, "window", 0) and getattr(near, "window", 1) > 0
    require(FORMAT, {"windows": windows})
    values: dict[str, Any] = {
        "architectures": ["Lfm3ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        SANDWICH: all(block.norms == "both" for block in config.layers),
        **write_fields(FORMAT, MLP, config.mixers["mlp"]),
    }
    if conv is not None:
        require(FORMAT, {"convolution's width": conv.channels == config.d_model})
        values |= write_fields(FORMAT, CONV, conv, ("channels",))
    both = {FULL: far, SLIDES: near}
    written = [_attention_fields(config, c) for c in both.values() if c is not None]
    require(FORMAT, {"attention of two sizes": all(w == written[0] for w in written)})
    for fields in written[:1]:
        values |= fields
    if near is not None:
        values[WINDOW] = near.window
    ropes = {
        kind: typed_rope_fields(FORMAT, c.rope)
        for kind, c in both.items()
        if c is not None
    }
    return values | {"rope_parameters": {**ROPES, **ropes}}


def _attention_fields(config: ModelConfig, c: AttentionConfig) -> dict[str, Any]:
    """Returns the fields that layers with and without a window share."""
    require(
        FORMAT,
        {
            "attention norms of q and k": c.qk_norm_eps == config.norm_eps,
            "lack of rotary": c.rope is not None and c.rope.dim == c.head_dim,
            "gate of channels": c.gated == c.gate_by_head,
        },
    )
    elsewhere = ("rope", "window", "qk_norm_eps", "gate_by_head")
    return write_fields(FORMAT, ATTENTION, c, elsewhere)


def expresses(config: ModelConfig) -> bool:
    mixers = {f"both:{kind}" for kind in TYPES}
    scaled = config.norm == "rms_float32" or config.embedding_multiplier != 1
    fits = "both:short_conv" in config.kinds or not scaled  # otherwise it is Gemma 3
    return alternates(config, mixers, {"both:mlp"}) and fits


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
