"""The best of many scores."""

from collections.abc import Callable, Sequence
from functools import cache

import jax
from jax import lax

from stree_jax import cpu_kernels


def best_scores(scores: jax.Array, count: int) -> Sequence[jax.Array]:
    """The largest [..., count] of scores [..., V] float32, their places, of equals the
    first, and the logarithm of the sum of exponentials [..., 1]."""
    return cpu_kernels.best_scores(scores, count, definition=_definition(count))


@cache
def _definition(count: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    def best(scores: jax.Array) -> tuple[jax.Array, ...]:
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return *lax.top_k(scores, count), total

    return best
