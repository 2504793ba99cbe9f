"""The place of the largest number, fast on a CPU too."""

import jax
import jax.numpy as jnp


def argmax(z: jax.Array) -> jax.Array:
    """`jnp.argmax` of the last axis of floats: the first of equals, or the first NaN.

    XLA:CPU goes through pairs of a number and its place one by one: 16 x 50,288 take
    3.7 ms on one core, the largest number and then its place 0.6.

    Args:
      z: [..., n] of any float dtype.

    Returns:
      [...] int32.
    """
    return jax.lax.platform_dependent(z, cpu=_in_two, default=_in_one)


def _in_one(z: jax.Array) -> jax.Array:
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _in_two(z: jax.Array) -> jax.Array:
    n = z.shape[-1]
    place = jnp.arange(n, dtype=jnp.int32).reshape((1,) * (z.ndim - 1) + (n,))
    there = (z == z.max(axis=-1, keepdims=True)) | jnp.isnan(z)
    return jnp.where(there, place, n).min(axis=-1)
