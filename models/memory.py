"""How many bytes a model and its state take, before any of them is made."""

import math
from typing import Any

import jax
import numpy as np

from stree_jax.models.config import ModelConfig
from stree_jax.models.model import param_shapes
from stree_jax.models.params import stored_dtype
from stree_jax.models.state import init_state


def weight_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """Of all parameters in `dtype`, but for those that are float32 always."""
    return sum(
        math.prod(shape) * np.dtype(stored_dtype(path[-1], dtype)).itemsize
        for path, shape in param_shapes(config).items()
    )


def size_of(tree: Any) -> int:
    """Of a pytree of arrays, or of `jax.ShapeDtypeStruct` that stand for them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_bytes(config: ModelConfig, batch: int, capacity: int, dtype: np.dtype) -> int:
    """Of the state that decoding keeps.

    Args:
      batch: B, rows.
      capacity: rows of each attention cache, in tokens.
      dtype: of the caches; what an SSM keeps in float32 stays so.
    """
    state = jax.eval_shape(lambda: init_state(config, batch, capacity, dtype))
    return size_of(state)
