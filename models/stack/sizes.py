"""Counts the bytes of a model and its state from its config, without jax."""

import math
from typing import Any

import numpy as np

from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.params import array_dtype
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.param_table import param_table
from stree_jax.models.weights.formats import format_named

LENGTH_BYTES = 4  # the number of committed tokens of a row, `State.length`


def weight_bytes(config: ModelConfig, dtype: Any) -> int:
    """Counts the bytes of all parameters of a model in a dtype or weight format."""
    format, total = format_named(dtype), 0
    for path, (param, _) in param_table(config).items():
        if param.quantizable:
            total += format.nbytes(param.shape, path)
        else:
            itemsize = np.dtype(array_dtype(param, format.dtype)).itemsize
            total += math.prod(param.shape) * itemsize
    return total


def state_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Counts the bytes of the state that decoding keeps.

    Args:
      config: the architecture.
      batch: B, rows of the batch.
      capacity: S, tokens for which each KV cache has space.
      dtype: dtype or format of the weights. SSM states are always float32.
    """
    kept, total = format_named(dtype).dtype, batch * LENGTH_BYTES
    for block in config.layers:
        for name in config.mixer_names(block):
            c = config.mixers[name]
            arrays = mixer_of(c).state_arrays(c, batch, capacity, kept)
            for shape, each in arrays.values():
                total += math.prod(shape) * np.dtype(each).itemsize
    return total
