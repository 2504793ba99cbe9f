"""Computes the random numbers of `jax.random`, bit for bit, in fewer operations.

On a CPU, `jax.random` runs Threefry's rounds in a loop so that it compiles fast, and
each round is a separate operation over all numbers. The Gumbel noise of 50,280 tokens
takes 0.36 ms; a tree of depth 5 needs it five times, a tenth of a bfloat16 step. The
unrolled rounds are a single operation of 0.15 ms. (Threefry-2x32 with 20 rounds: Salmon
et al., Parallel random numbers: as easy as 1, 2, 3, 2011.)
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.base.keys import IMPL

PARITY = 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def threefry(
    key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns two random words for each pair of counters [...] uint32; the key consists
    of two words [] uint32."""
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
    """Returns `jax.random.fold_in` of a Threefry key [] and a number [] int32."""
    low = jnp.asarray(number, jnp.int32).astype(jnp.uint32)
    folded = threefry(_words(key), jnp.zeros_like(low), low)
    return jax.random.wrap_key_data(jnp.stack(folded), impl=IMPL)


def uniform(key: jax.Array, size: int) -> jax.Array:
    """Returns `jax.random.uniform` of a Threefry key [] as [size] float32 in [0, 1).

    jax's own depends on `jax_threefry_partitionable`; this is always its default.
    """
    low = jnp.arange(size, dtype=jnp.uint32)
    a, b = threefry(_words(key), jnp.zeros_like(low), low)
    mantissa = (a ^ b) >> jnp.uint32(9)  # of a float in [1, 2)
    bits = mantissa | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.0


def gumbel(key: jax.Array, size: int) -> jax.Array:
    """Returns `jax.random.gumbel` of a Threefry key [] as [size] float32."""
    # At least `tiny`, so that the logarithm is finite.
    tiny = float(jnp.finfo(jnp.float32).tiny)
    drawn = jnp.maximum(uniform(key, size) * (1.0 - tiny) + tiny, tiny)
    return -jnp.log(-jnp.log(drawn))


def as_threefry(key: Any) -> jax.Array:
    """Returns one Threefry key [] for a key of any kind.

    Threefry keys are returned as they are. An "rbg" key made from a seed contains the
    Threefry key of that seed, which is used: `jax.random.key(seed)` gives the same text
    with either default generator. The words of other keys are hashed to two words.

    Args:
      key: a key of `jax.random.key`, or of `jax.random.PRNGKey` (uint32 words).

    Raises:
      ValueError: `key` is not a single key.
    """
    typed = is_typed(key)
    if not typed and not _is_raw_key(key):
        got = f"{key.dtype}{list(key.shape)}" if hasattr(key, "shape") else repr(key)
        raise ValueError(f"key: want a key of jax.random.key, got {got}")
    if typed and key.shape != ():
        several = "give one, or one for each prompt"
        raise ValueError(f"key: want one key, got keys {list(key.shape)}; {several}")
    words = jax.random.key_data(key) if typed else jnp.asarray(key)
    words = jnp.pad(words, (words.size % 2, 0)).reshape(-1, 2)
    first, mixed = words[0], words[0]
    for pair in words[1:]:
        mixed = jnp.stack(threefry((mixed[0], mixed[1]), pair[0], pair[1]))
    mixed = jnp.where((words == first[None]).all(), first, mixed)
    return jax.random.wrap_key_data(mixed, impl=IMPL)


def is_typed(key: Any) -> bool:
    """True for keys of `jax.random.key`."""
    array = isinstance(key, jax.Array)
    return array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _is_raw_key(key: Any) -> bool:
    """True for the words of one key: two of Threefry, or four of "rbg"."""
    array = isinstance(key, jax.Array | np.ndarray)
    return array and key.dtype == np.uint32 and key.shape in ((2,), (4,))


# XLA's code for Threefry's twenty rounds and two logarithms is scalar; the kernel's is
# vectorised. Its results differ by a few units in the last place of the logarithms.
@cpu_kernel(
    "stree_noise",
    outputs=lambda words, _, *, size: floats(words.shape[0], size),
    unsupported=lambda words, _, *, size: 0 in (words.shape[0], size),
)
def noise(words: jax.Array, numbers: jax.Array, *, size: int) -> jax.Array:
    """Returns `gumbel` [n, size] of keys, each folded in turn with its numbers.

    Args:
      words: [n, 2] uint32, of Threefry keys.
      numbers: [n, k] int32; k may be 0.
    """

    def one(words: jax.Array, numbers: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl=IMPL)
        return gumbel(reduce(fold_in, numbers, key), size)

    return jax.vmap(one)(words, numbers)


def _words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    data = jax.random.key_data(key)
    return data[0], data[1]
