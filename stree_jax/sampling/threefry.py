"""The random numbers of `jax.random`, bit for bit, in few operations.

`jax.random` on a CPU goes through Threefry's rounds in a loop, to compile fast, and
each turn of it is an operation of its own over all numbers: the Gumbel noise of 50,280
tokens takes 0.36 ms, a tenth of a bfloat16 step where a tree needs it for five depths.
The rounds written out are one operation, 0.15 ms. (Threefry-2x32 with 20 rounds: Salmon
et al., Parallel random numbers: as easy as 1, 2, 3, 2011.)
"""

from collections.abc import Callable
from functools import cache, reduce

import jax
import jax.numpy as jnp

from stree_jax import cpu_kernels

PARITY = 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def threefry(
    key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two random words for each pair of counters [...] uint32, by a key of two []."""
    first, second = key
    words = first, second, first ^ second ^ jnp.uint32(PARITY)
    a, b = high + first, low + second
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            a = a + b
            b = (b << jnp.uint32(distance)) | (b >> jnp.uint32(32 - distance))
            b = b ^ a
        a = a + words[(group + 1) % 3]
        b = b + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """`jax.random.fold_in`, of a Threefry key [] and a number [] int32."""
    low = jnp.asarray(number, jnp.int32).astype(jnp.uint32)
    folded = threefry(_words(key), jnp.zeros_like(low), low)
    return jax.random.wrap_key_data(jnp.stack(folded), impl="threefry2x32")


def gumbel(key: jax.Array, size: int) -> jax.Array:
    """`jax.random.gumbel`, of a Threefry key []: [size] float32."""
    low = jnp.arange(size, dtype=jnp.uint32)
    a, b = threefry(_words(key), jnp.zeros_like(low), low)
    # The bits of a float in [1, 2), less 1; then in [tiny, 1), so that its logarithm is
    # a number.
    mantissa = (a ^ b) >> jnp.uint32(9)
    uniform = jax.lax.bitcast_convert_type(
        mantissa | jnp.uint32(0x3F800000), jnp.float32
    )
    tiny = float(jnp.finfo(jnp.float32).tiny)
    uniform = jnp.maximum((uniform - 1.0) * (1.0 - tiny) + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def noise(words: jax.Array, numbers: jax.Array, size: int) -> jax.Array:
    """`gumbel` [n, size] of keys, each folded with its numbers in turn.

    Args:
      words: [n, 2] uint32, of Threefry keys.
      numbers: [n, k] int32.
    """
    return cpu_kernels.gumbel_noise(words, numbers, size, definition=_noise(size))


@cache
def _noise(size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def one(words: jax.Array, numbers: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return gumbel(reduce(fold_in, numbers, key), size)

    return jax.vmap(one)


def _words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    data = jax.random.key_data(key)
    return data[0], data[1]
