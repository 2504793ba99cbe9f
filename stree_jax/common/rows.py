"""Rows of a batch."""

import jax
import jax.numpy as jnp


def repeated(x: jax.Array, n: int) -> jax.Array:
    """Returns each row of an array [B, ...] n times, [B n, ...].

    Rows stay on their devices. `jnp.repeat` refuses rows that are sharded over a mesh
    with explicit axes.
    """
    several = jnp.broadcast_to(x[:, None], (x.shape[0], n, *x.shape[1:]))
    return several.reshape(x.shape[0] * n, *x.shape[1:])
