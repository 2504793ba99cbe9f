"""Gemma 3 files of llama.cpp (`gemma3`): names and metadata keys.

Norms hold 1 + w. Most files lack three things, which are constants in llama.cpp's code:
which layers have a window, the rotary embedding of these layers, and the softmax scale.

Sources: llama.cpp's `conversion/gemma.py` and its `models/gemma3.cpp`.
"""

import math
from dataclasses import replace
from typing import Any

from stree_jax.convert.families.huggingface import with_mlps
from stree_jax.convert.families.tensor_map import Part
from stree_jax.convert.families.windows import NEAR
from stree_jax.convert.gguf.keys import (
    MLP,
    WINDOW,
    attention_config,
    attention_values,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    values_of,
)
from stree_jax.convert.gguf.names import HALVES, attention_rows
from stree_jax.convert.gguf.rotary import rope, rope_values
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig, Rope
from stree_jax.models.stack.config import blocks, named

PATTERN = "attention.sliding_window_pattern"  # every n-th layer has no window
NEAR_THETA = "rope.freq_base_swa"  # base of the rotary embedding of layers with windows
LAYERS_27B = 62  # only the model with so many layers has another softmax scale
KEYS = (WINDOW,)  # keys of `keys.NEUTRAL` that are read
NAMES = replace(
    HALVES.with_parts(**{NEAR: Part("", attention_rows)}),
    norm_after_mixer="post_attention_norm",
    norm_after_mlp="post_ffw_norm",
)


def parse(fields: ConfigFields) -> ModelConfig:
    model, c, count = (
        model_options(fields),
        attention_config(fields),
        layer_count(fields),
    )
    whole = model["d_model"] // c.num_heads if count == LAYERS_27B else c.head_dim
    c = replace(
        c,
        scale=whole**-0.5,
        qk_norm_eps=model["norm_eps"],
        qk_norm_float32=True,
    )
    window = fields.size(WINDOW, 0, low=0)
    every = fields.size(PATTERN, 6) if window else 1
    kinds = tuple(NEAR if (i + 1) % every else "attention" for i in range(count))
    far = near = None
    if "attention" in kinds:
        far = replace(c, rope=rope(fields, c.head_dim))
    if NEAR in kinds:
        turned = Rope(fields.positive(NEAR_THETA, 10000.0), c.head_dim)
        near = replace(c, rope=turned, window=window)
    mlp = replace(mlp_config(fields), activation="gelu_tanh")
    return ModelConfig(
        **model,
        norm="rms_float32",
        embedding_multiplier=math.sqrt(model["d_model"]),
        layers=blocks(f"both:{kind}" for kind in with_mlps(kinds)),
        mixers=named(**{"attention": far, NEAR: near, "mlp": mlp}),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse`."""
    kinds = mixers_of(config)
    far, near = config.mixers["attention"], config.mixers.get(NEAR)
    values = model_values(config) | attention_values(far) | rope_values(far.rope)
    values |= values_of(MLP, config.mixers["mlp"])
    if near is not None:
        every = (*kinds, "attention").index("attention") + 1
        values |= {WINDOW: near.window, PATTERN: every, NEAR_THETA: near.rope.theta}
    return values
