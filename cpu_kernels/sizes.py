"""Sizes that may be symbolic: `jax.export` traces programs for any batch or length."""

from typing import Any

import numpy as np


def symbolic_size(size: Any) -> bool:
    """True if a size is not a number, but a symbolic dimension."""
    return not isinstance(size, int | np.integer)


def symbolic(args: Any) -> bool:
    """True if an array of a pytree has a symbolic size."""
    import jax

    shapes = (getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(args))
    return any(symbolic_size(size) for shape in shapes for size in shape)


def at_most(size: int, limit: int) -> bool:
    """True if a size is at most `limit`. False if it is symbolic."""
    return not symbolic_size(size) and size <= limit
