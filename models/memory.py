"""Counts the bytes of a model and its state before they are made."""

from typing import Any

import jax

from stree_jax.models.config import ModelConfig
from stree_jax.models.shapes import abstract_params
from stree_jax.models.state import init_state
from stree_jax.models.weights.formats import format_named


def weight_bytes(config: ModelConfig, dtype: Any) -> int:
    """Counts the bytes of all parameters of a model in a dtype or weight format."""
    return size_of(abstract_params(config, dtype))


def size_of(tree: Any) -> int:
    """Counts the bytes of a pytree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Counts the bytes of the state that decoding keeps.

    Args:
      batch: B, rows.
      capacity: rows of each attention cache, in tokens.
      dtype: of the weights, or their format. SSM states are float32 always.
    """
    kept = format_named(dtype).dtype
    state = jax.eval_shape(lambda: init_state(config, batch, capacity, kept))
    return size_of(state)
