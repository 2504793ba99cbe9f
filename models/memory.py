"""How many bytes a model and its state take, before any of them is made."""

from typing import Any

import jax
import numpy as np

from stree_jax.models.config import ModelConfig
from stree_jax.models.model import Model
from stree_jax.models.params import array_dtype
from stree_jax.models.shapes import abstract_params
from stree_jax.models.state import init_state


def weight_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """Of all parameters of a model in `dtype`, scales of int8 included."""
    return size_of(abstract_params(config, dtype))


def weights_read(model: Model) -> int:
    """Returns the bytes of weights that a pass reads: all but an embedding that is not
    also the head."""
    total = size_of(model.params)
    if not model.config.tie_embeddings:
        total -= size_of(model.params["embedding"])
    return total


def size_of(tree: Any) -> int:
    """Of a pytree of arrays, or of `jax.ShapeDtypeStruct` that stand for them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_bytes(config: ModelConfig, batch: int, capacity: int, dtype: np.dtype) -> int:
    """Of the state that decoding keeps.

    Args:
      batch: B, rows.
      capacity: rows of each attention cache, in tokens.
      dtype: of the weights, see `array_dtype`; what an SSM keeps in float32 stays so.
    """
    kept = array_dtype(dtype)
    state = jax.eval_shape(lambda: init_state(config, batch, capacity, kept))
    return size_of(state)
