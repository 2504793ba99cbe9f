"""Gumbel noise, and the best of many scores: `src/noise_ffi.cc`.

XLA writes Threefry's twenty rounds and two logarithms out number by number, and looks
for the best and for the sum of exponentials in four operations. The bits of noise are
those of `jax.random` up to a few units in the last place of its logarithms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.native_call import called


@dataclass(frozen=True)
class _Noise:
    size: int

    def __call__(
        self, words: jax.Array, numbers: jax.Array, *, level: int
    ) -> jax.Array:
        out = jax.ShapeDtypeStruct((words.shape[0], self.size), jnp.float32)
        call = jax.ffi.ffi_call("stree_noise", out)
        return call(words, numbers, level=np.int64(level))


def gumbel_noise(
    words: jax.Array,
    numbers: jax.Array,
    size: int,
    *,
    definition: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Noise [n, size] float32 of keys, each folded with its numbers in turn.

    Args:
      words: [n, 2] uint32, of Threefry keys.
      numbers: [n, k] int32; k may be 0.
      definition: of both; what runs where no kernel can.
    """
    (out,) = called(
        *(words, numbers),
        kernel=_Noise(size),
        definition=definition,
        fits=0 not in (words.shape[0], size),
    )
    return out


@dataclass(frozen=True)
class _Best:
    count: int

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        target = "stree_best" if len(arrays) == 1 else "stree_best_drawn"
        shape = *arrays[0].shape[:-1], self.count
        values = jax.ShapeDtypeStruct(shape, jnp.float32)
        places = jax.ShapeDtypeStruct(shape, jnp.int32)
        totals = jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32)
        call = jax.ffi.ffi_call(target, (values, places, totals))
        return call(*arrays, level=np.int64(level))


def best_scores(
    scores: jax.Array, count: int, *, definition: Callable[..., Any]
) -> Sequence[jax.Array]:
    """The largest [..., count] of scores [..., V], their places, of equals the first,
    and the logarithm of the sum of exponentials [..., 1].

    Args:
      definition: of the scores; what runs where no kernel can.
    """
    return called(
        scores,
        kernel=_Best(count),
        definition=definition,
        fits=scores.ndim > 1 and scores.size > 0,
    )


def best_drawn(
    logits: jax.Array,
    temperature: jax.Array,
    noise: jax.Array,
    count: int,
    *,
    definition: Callable[..., Any],
) -> Sequence[jax.Array]:
    """`best_scores` of logits [B, Q, V] by temperatures [B], and with noise [B, V].

    Args:
      definition: of the arrays; what runs where no kernel can.
    """
    return called(
        *(logits, temperature, noise),
        kernel=_Best(count),
        definition=definition,
        fits=logits.size > 0,
    )
