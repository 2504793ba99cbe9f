"""Multiplies a model's multipliers into its weights, as llama.cpp's converter does for
Falcon-H1.

Source: llama.cpp's `conversion/falcon_h1.py`.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig
from stree_jax.models.configs.params import Path


def without_multipliers(config: ModelConfig) -> ModelConfig:
    """Returns the config with all multipliers at their defaults."""
    mixers = {name: _plain(mixer) for name, mixer in config.mixers.items()}
    return replace(_plain(config), mixers=mixers)


def _plain(part: Any) -> Any:
    """Returns a config with the defaults of its multipliers and divisors."""
    endings = ("_multiplier", "_multipliers", "_divisor")
    each = [field for field in fields(part) if field.name.endswith(endings)]
    return replace(part, **{field.name: field.default for field in each})


def factor_of(config: ModelConfig, path: Path) -> np.ndarray | float:
    """Returns the factor of a parameter: one, or one for each of its rows, [rows]."""
    if path == ("lm_head",):
        return 1 / config.logits_divisor
    if path == ("embedding",):
        return config.embedding_multiplier
    if len(path) < 3:
        return 1.0
    name = path[-1]
    is_bias = name.endswith("_bias")
    match config.mixers.get(path[1]):
        case AttentionConfig() as c if name in ("qkv", "qkv_bias"):
            into = 1.0 if is_bias else c.in_multiplier
            kv = c.num_kv_heads * c.head_dim
            each = (into, into * c.key_multiplier, into)
            return np.repeat(
                np.array(each, np.float32), (c.num_heads * c.head_dim, kv, kv)
            )
        case AttentionConfig() as c if name in ("out", "out_bias"):
            return c.out_multiplier
        case MambaConfig() as c if name in ("in_proj", "in_proj_bias"):
            into = 1.0 if is_bias else c.in_multiplier
            states = c.n_groups * c.d_state
            widths = (c.d_inner, c.d_inner, states, states, c.num_heads)
            return np.repeat(
                np.array(c.part_multipliers, np.float32) * np.float32(into), widths
            )
        case MambaConfig() as c if name in ("out_proj", "out_proj_bias"):
            return c.out_multiplier
        case MLPConfig() as c if name in ("gate_up", "gate_up_bias"):
            return np.repeat(np.array((c.gate_multiplier, 1), np.float32), c.d_hidden)
        case MLPConfig() as c if name in ("down", "down_bias"):
            return c.down_multiplier
    return 1.0


def times(param: np.ndarray, factor: np.ndarray | float) -> np.ndarray:
    """Multiplies a parameter by the result of `factor_of`."""
    column = np.array(factor, np.float32).reshape(-1, *[1] * (param.ndim - 1))
    return param * column
