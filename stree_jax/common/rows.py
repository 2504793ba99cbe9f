"""Rows of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import export


def repeated(x: jax.Array, n: Any) -> jax.Array:
    """Returns each row of an array [B, ...] n times, [B n, ...].

    Rows stay on their devices. `jnp.repeat` refuses rows that are sharded over a mesh
    with explicit axes.
    """
    several = jnp.broadcast_to(x[:, None], (x.shape[0], n, *x.shape[1:]))
    return several.reshape(x.shape[0] * n, *x.shape[1:])


def symbolic_dimension(value: Any) -> bool:
    """True for a symbolic dimension of `jax.export`."""
    return isinstance(getattr(value, "scope", None), export.SymbolicScope)


def spread(value: Any) -> bool:
    """True for an array on several devices. While a program is traced, no array is."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return len(value.sharding.device_set) > 1
