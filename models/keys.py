"""Random keys and numbers of this library's own, the same under all settings of jax.

What follows from a seed, a text or a model's first weights, must not depend on
`jax_default_prng_impl` (TPU programs often set "rbg"), `jax_random_seed_offset` or
`jax_threefry_partitionable`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

IMPL = "threefry2x32"


def key_of(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)` [] as it is under jax's default settings.

    Args:
      seed: at least 0, and below 2^64.
    """
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jax.device_put(words), impl=IMPL)


@contextmanager
def default_numbers() -> Iterator[None]:
    """Makes `jax.random` draw from a key what it draws under jax's default settings.

    Programs must be compiled inside: the setting counts when they are lowered.
    """
    with jax.threefry_partitionable(True):
        yield
