"""Counts the bytes of a model and its state from its config, without jax."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import Arrays, Mixer
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
    own = format_named(dtype).dtype
    layers = _bytes_of(config, lambda m, c: m.state_arrays(c, batch, capacity, own))
    return layers + batch * LENGTH_BYTES


def fixed_state_bytes(config: ModelConfig, batch: int, dtype: Any) -> int:
    """Counts the bytes of the states and windows, whose size does not depend on the
    length of the text. Arguments as for `state_bytes`."""
    return state_bytes(config, batch, 0, dtype) - batch * LENGTH_BYTES


def record_bytes(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> int:
    """Counts the bytes of the records of `nodes` nodes.

    Args:
      config, batch: as for `state_bytes`.
      nodes: T.
      dtype: dtype of the records.
    """
    return _bytes_of(config, lambda m, c: m.record_arrays(c, batch, nodes, dtype))


def _bytes_of(
    config: ModelConfig, arrays_of: Callable[[Mixer[Any], Any], Arrays]
) -> int:
    """Counts the bytes of arrays of all layers' mixers."""
    names = [name for block in config.layers for name in config.mixer_names(block)]
    configs = [config.mixers[name] for name in names]
    arrays = [each for c in configs for each in arrays_of(mixer_of(c), c).values()]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
