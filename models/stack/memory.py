"""Counts the bytes of a model and its state before they are allocated."""

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
    """Counts the bytes of a pytree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
