"""Random keys and numbers that do not depend on jax's global settings.

A seed must give the same text and the same initial weights whatever
`jax_default_prng_impl` (TPU programs often set "rbg"), `jax_random_seed_offset` or
`jax_threefry_partitionable` are set to.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

IMPL = "threefry2x32"


def key_of(seed: int) -> jax.Array:
    """Returns the key [] that `jax.random.key(seed)` makes under jax's defaults.

    Args:
      seed: an int from 0 to 2^64 - 1.
    """
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jax.device_put(words), impl=IMPL)


@contextmanager
def default_numbers() -> Iterator[None]:
    """Makes `jax.random` draw the same numbers from a key as under jax's defaults.

    Compile programs inside this context: the setting takes effect during lowering.
    """
    with jax.threefry_partitionable(True):
        yield
