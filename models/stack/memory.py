"""Counts the bytes of a model and its state before they are allocated."""

import math
from typing import Any

import jax

from stree_jax.models.stack.model import Model
from stree_jax.models.stack.param_table import PER_LAYER


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
