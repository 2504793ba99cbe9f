"""llama.cpp's architectures whose attention differs between layers or positions:
`smollm3`, `olmo2` (OLMo 2 and Olmo 3), `mistral3` and `granite_swa`.

Sources: llama.cpp's `models/smollm3.cpp`, `olmo2.cpp`, `mistral3.cpp` and
`granite-swa.cpp`, and its `conversion/`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.convert.families.huggingface import with_mlps
from stree_jax.convert.families.tensor_map import Part, Path, Row
from stree_jax.convert.families.windows import NEAR, attention_mixers
from stree_jax.convert.gguf.keys import (
    SCALES,
    SOFTMAX_SCALE,
    WINDOW,
    attention_config,
    attention_values,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    second_mixer,
    second_values,
)
from stree_jax.convert.gguf.names import (
    HALVES,
    PAIRS,
    linear_rows,
    moe_rows,
    paired_attention_rows,
)
from stree_jax.convert.gguf.rotary import ORIGINAL, rope, rope_values
from stree_jax.convert.gguf.rotary import TURNS as SCALED_TURNS
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, ModelConfig, MoEConfig, Rope
from stree_jax.models.configs.rope import Temperature
from stree_jax.models.stack.config import blocks, named

NOPE_STEP = 4  # in files of "smollm3", every 4th layer has no rotary embedding
PATTERN, ROTATES = "attention.sliding_window_pattern", "attention.rope_pattern"
TEMPERATURE = "attention.temperature_scale"
LOG, TURNS = "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_attn_factor"
FAST, SLOW = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
# Keys of `keys.NEUTRAL` that the architectures read.
OLMO_KEYS = (WINDOW, TURNS)
MISTRAL_KEYS = (TEMPERATURE, LOG, FAST, SLOW)
GRANITE_KEYS = (
    WINDOW,
    "expert_count",
    SOFTMAX_SCALE.name,
    *(field.name for field in SCALES),
)


def sink_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with sinks."""
    yield from paired_attention_rows(ours, block, c)
    yield Row((*ours, "sinks"), (f"{block}attn_sinks.weight",))


def fused_moe_rows(ours: Path, block: str, c: MoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts where gate and up are
    one tensor, also in the shared MLP."""
    yield from moe_rows(ours, block, replace(c, shared=None), fused=True)
    names = {"gate_up": "ffn_up_shexp", "down": "ffn_down_shexp"}
    yield from linear_rows((*ours, "shared"), block, names)


OLMO_NAMES = replace(
    HALVES,
    norm_after_mixer="post_attention_norm",
    norm_after_mlp="post_ffw_norm",
)
GRANITE_NAMES = PAIRS.with_parts(
    attention=Part("", sink_rows), moe=Part("", fused_moe_rows)
)


def _per_layer_flags(
    fields: ConfigFields, name: str, default: list[bool]
) -> list[bool]:
    """Reads a flag for each layer."""
    flags = fields.get(name, None)
    if flags is None:
        return default
    odd = not isinstance(flags, np.ndarray) or flags.dtype.kind not in "biu"
    if odd or len(flags) != len(default):
        raise fields.wants(name, f"{len(default)} flags", flags)
    return [bool(flag) for flag in flags.tolist()]


def parse_smollm3(fields: ConfigFields) -> ModelConfig:
    c = attention_config(fields)
    turned, count = replace(c, rope=rope(fields, c.head_dim)), layer_count(fields)
    each = [turned if (i + 1) % NOPE_STEP else c for i in range(count)]
    kinds, mixers = attention_mixers(each)
    return ModelConfig(
        **model_options(fields),
        layers=blocks(with_mlps(kinds)),
        mixers=named(**mixers, mlp=mlp_config(fields)),
    )


def parse_olmo2(fields: ConfigFields) -> ModelConfig:
    """Parses OLMo 2 and Olmo 3. Layers with a window have an unscaled rotary
    embedding."""
    model, count = model_options(fields), layer_count(fields)
    c = attention_config(fields)
    c = replace(c, qk_norm_eps=model["norm_eps"], qk_norm_whole=True)
    turned = rope(fields, c.head_dim)
    _check_turns(fields, turned)
    window = fields.size(WINDOW, 0, low=0)
    slides = [False] * count
    if window:
        slides = _slides(fields, count)
    kinds = tuple(NEAR if near else "attention" for near in slides)
    far = near = None
    if "attention" in kinds:
        far = replace(c, rope=turned)
    if NEAR in kinds:
        near = replace(c, rope=Rope(turned.theta, turned.dim), window=window)
    return ModelConfig(
        **model,
        layers=blocks(f"after:{kind}" for kind in with_mlps(kinds)),
        mixers=named(**{"attention": far, NEAR: near, "mlp": mlp_config(fields)}),
    )


def _slides(fields: ConfigFields, count: int) -> list[bool]:
    """Reads which layers have a window, from flags or from one number: each n-th layer
    has none."""
    if isinstance(fields.get(PATTERN, None), np.ndarray):
        return _per_layer_flags(fields, PATTERN, [False] * count)
    every = fields.size(PATTERN, 4)
    return [(i + 1) % every != 0 for i in range(count)]


def _check_turns(fields: ConfigFields, rope: Rope) -> None:
    """Checks the factor of the cosines and sines, which llama.cpp computes."""
    computed = 1.0 if rope.yarn is None else rope.yarn.attention_factor
    stored = fields.positive(TURNS, computed)
    if not math.isclose(stored, computed, rel_tol=1e-4):
        what = f"{stored} is not supported (llama.cpp uses {computed:.6g})"
        raise fields.error(TURNS, what)


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse_olmo2`."""
    near = config.mixers.get(NEAR)
    c = config.mixers.get("attention", near)
    assert c is not None  # of `Architecture.layers`
    values = model_values(config) | attention_values(c) | rope_values(c.rope)
    values |= second_values(config)
    if near is not None:
        slides = np.array([kind == NEAR for kind in mixers_of(config)])
        values |= {WINDOW: near.window, PATTERN: slides}
    return values


def parse_mistral3(fields: ConfigFields) -> ModelConfig:
    """Parses Ministral 3 and Mistral Small 3."""
    c = attention_config(fields)
    c = replace(c, rope=_yarn(fields, rope(fields, c.head_dim)))
    if growth := fields.finite(TEMPERATURE, 0.0):
        trained = ORIGINAL if ORIGINAL in fields.values else "context_length"
        c = replace(c, temperature=Temperature(growth, fields.positive(trained)))
    return ModelConfig(
        **model_options(fields),
        layers=blocks(with_mlps(("attention",) * layer_count(fields))),
        mixers=named(attention=c, mlp=mlp_config(fields)),
    )


def _yarn(fields: ConfigFields, rope: Rope) -> Rope:
    """Returns the embedding with the keys of YaRN that only a few architectures
    have."""
    if (yarn := rope.yarn) is None:
        return rope
    weight, turns = fields.finite(LOG, 0.0), yarn.attention_factor
    if weight and yarn.factor > 1:
        turns /= 0.1 * weight * math.log(yarn.factor) + 1.0
    yarn = replace(
        yarn,
        attention_factor=turns,
        beta_fast=fields.positive(FAST, 32.0),
        beta_slow=fields.positive(SLOW, 1.0),
    )
    return replace(rope, yarn=yarn)


def write_mistral3(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse_mistral3`."""
    c = config.mixers["attention"]
    values = model_values(config) | attention_values(c) | rope_values(c.rope)
    values |= second_values(config)
    if (yarn := c.rope.yarn) is not None:
        values |= {FAST: yarn.beta_fast, SLOW: yarn.beta_slow}
        if yarn.factor > 1:  # see `_yarn`
            growth = 0.1 * math.log(yarn.factor)
            del values[SCALED_TURNS]
            values[LOG] = ((growth + 1.0) / yarn.attention_factor - 1.0) / growth
    if (t := c.temperature) is not None:
        values |= {TEMPERATURE: t.growth, ORIGINAL: round(t.length)}
    return values


def parse_granite_swa(fields: ConfigFields) -> ModelConfig:
    """Parses Granite with windows and sinks, dense or with experts."""
    count = layer_count(fields)
    c = replace(attention_config(fields, SOFTMAX_SCALE), sinks=True)
    turned, window = rope(fields, c.head_dim), fields.size(WINDOW)
    fields.get(PATTERN)  # raises if it is missing
    slides = _per_layer_flags(fields, PATTERN, [False] * count)
    rotates = _per_layer_flags(fields, ROTATES, [True] * count)
    each = [
        replace(c, rope=turned if turns else None, window=window if near else 0)
        for turns, near in zip(rotates, slides, strict=True)
    ]
    kinds, mixers = attention_mixers(each)
    second = second_mixer(fields)
    return ModelConfig(
        **model_options(fields, *SCALES),
        layers=blocks(with_mlps(kinds, *second)),
        mixers=named(**mixers, **second),
    )


def write_granite_swa(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse_granite_swa`."""
    each = [config.mixers[kind] for kind in mixers_of(config)]
    c = next((own for own in each if own.rope is not None), each[0])
    values = model_values(config, *SCALES) | attention_values(c, SOFTMAX_SCALE)
    values |= rope_values(c.rope) | second_values(config)
    values[WINDOW] = max(own.window for own in each)
    values[PATTERN] = np.array([own.window > 0 for own in each])
    values[ROTATES] = np.array([own.rope is not None for own in each])
    return values
