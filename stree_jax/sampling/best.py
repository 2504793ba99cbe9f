"""The best of many scores, and of what is drawn."""

from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax import cpu_kernels
from stree_jax.models.argmax import argmax


def best_scores(scores: jax.Array, count: int) -> Sequence[jax.Array]:
    """The largest [..., count] of scores [..., V] float32, their places, of equals the
    first, and the logarithm of the sum of exponentials [..., 1]."""
    return cpu_kernels.best_scores(scores, count, definition=_best(count))


def best_drawn(
    logits: jax.Array, temperature: jax.Array, noise: jax.Array, count: int
) -> Sequence[jax.Array]:
    """`best_scores` of logits [B, Q, V], tempered, and their row's noise [B, V].

    Args:
      temperature: [B] float32; rows of 0 are greedy, and have no noise.
    """
    asked = logits, temperature, noise
    return cpu_kernels.best_drawn(*asked, count, definition=_drawn(count))


def tempered(temperature: jax.Array, logits: jax.Array) -> jax.Array:
    """Logits [B, Q, V] by temperatures [B], 0 counting as 1; the largest becomes 0."""
    # First of all, so that a tiny temperature cannot overflow.
    z = logits - logits.max(axis=-1, keepdims=True)
    return z / jnp.where(temperature == 0, 1.0, temperature)[:, None, None]


@cache
def _best(count: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    def best(scores: jax.Array) -> tuple[jax.Array, ...]:
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        if count > 2:
            return *lax.top_k(scores, count), total
        places = argmax(scores)[..., None]  # on a GPU it is faster than a sort
        if count == 2:
            place = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
            others = jnp.where(place == places, -jnp.inf, scores)
            second = argmax(others)[..., None]
            # Where nothing else is left, the first of the others.
            second = jnp.where(
                second == places, (places == 0).astype(jnp.int32), second
            )
            places = jnp.concatenate([places, second], axis=-1)
        return jnp.take_along_axis(scores, places, axis=-1), places, total

    return best


@cache
def _drawn(count: int) -> Callable[..., tuple[jax.Array, ...]]:
    def drawn(
        logits: jax.Array, temperature: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, ...]:
        noise = jnp.where(temperature[:, None] == 0, 0.0, noise)
        return _best(count)(tempered(temperature, logits) + noise[:, None])

    return drawn
