"""Argmax over the last axis, also fast on a CPU."""

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import by_platform, cpu_kernel, ints


def _unsupported(z: jax.Array) -> bool:
    return z.dtype != jnp.float32 or z.ndim < 2 or z.size == 0


@cpu_kernel(
    "stree_argmax", outputs=lambda z: ints(*z.shape[:-1]), unsupported=_unsupported
)
def argmax(z: jax.Array) -> jax.Array:
    """Returns `jnp.argmax` of the last axis: the first of equal maxima, or the first
    NaN.

    XLA:CPU compiles `jnp.argmax` to a scalar loop over (value, index) pairs. For 16 x
    50,288 float32 on one core that takes 3.6 ms. Computing the maximum first and then
    its index, row by row, takes 0.6 ms and needs no temporary of the size of z; the CPU
    kernel takes less than 0.1 ms.

    Args:
      z: [..., n] of any float dtype.

    Returns:
      [...] int32.
    """
    return by_platform(z, cpu=_max_then_index, default=_argmax)


def _argmax(z: jax.Array) -> jax.Array:
    return jnp.argmax(z, axis=-1).astype(jnp.int32)


def _max_then_index(z: jax.Array) -> jax.Array:
    return jax.lax.map(_index_of_max, z.reshape(-1, z.shape[-1])).reshape(z.shape[:-1])


def _index_of_max(row: jax.Array) -> jax.Array:
    n = row.shape[0]
    is_max = (row == row.max()) | jnp.isnan(row)
    return jnp.where(is_max, jnp.arange(n, dtype=jnp.int32), n).min()
