"""Counts the bytes of a model and its state before they are allocated."""

import math
from typing import Any

import jax

from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.stack.per_layer import PER_LAYER
from stree_jax.models.stack.shapes import abstract_params
from stree_jax.models.stack.state import init_state
from stree_jax.models.weights.formats import format_named


def weight_bytes(config: ModelConfig, dtype: Any) -> int:
    """Counts the bytes of all parameters of a model in a dtype or weight format."""
    return size_of(abstract_params(config, dtype))


def weights_read(model: Model) -> int:
    """Counts the bytes of weights that a forward pass reads.

    That is every weight except an untied embedding and the table of per-layer inputs,
    of which a pass reads a few rows.
    """
    total = size_of(model.params)
    if not model.config.tie_embeddings:
        total -= size_of(model.params["embedding"])
    if PER_LAYER in model.params:
        total -= size_of(model.params[PER_LAYER]["embedding"])
    return total


def size_of(tree: Any) -> int:
    """Counts the bytes of a pytree of arrays or `jax.ShapeDtypeStruct`s.

    Of an array that is sharded over a mesh, only the part of one device counts: these
    are the bytes that each device holds.
    """
    return sum(map(_bytes_of, jax.tree.leaves(tree)))


def _bytes_of(leaf: Any) -> int:
    known = not isinstance(leaf, jax.core.Tracer)
    sharding = getattr(leaf, "sharding", None) if known else None
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return int(math.prod(shape) * leaf.dtype.itemsize)


def state_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Counts the bytes of the state that decoding keeps.

    Args:
      config: the architecture.
      batch: B, rows of the batch.
      capacity: S, tokens for which each KV cache has space.
      dtype: dtype or format of the weights. SSM states are always float32.
    """
    kept = format_named(dtype).dtype
    state = jax.eval_shape(lambda: init_state(config, batch, capacity, kept))
    return size_of(state)
