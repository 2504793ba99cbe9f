"""Finds the largest scores, with or without sampling noise."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import cpu_kernel, floats, ints
from stree_jax.models.base.argmax import argmax
from stree_jax.models.base.derivative import with_derivative
from stree_jax.models.base.rounding import uncontracted


def tempered(temperature: jax.Array, logits: jax.Array) -> jax.Array:
    """Divides logits [B, Q, V] by temperatures [B] (0 counts as 1) and shifts them so
    that the largest is 0."""
    return with_derivative(_tempered, _tempered_allowed)(temperature, logits)


def _tempered(temperature: jax.Array, logits: jax.Array) -> jax.Array:
    # Shift before the division, so that a tiny temperature cannot overflow.
    z = logits - logits.max(axis=-1, keepdims=True)
    # XLA makes a product of the division.
    divisor = jnp.where(temperature == 0, 1.0, temperature)[:, None, None]
    return uncontracted(z / divisor)


def _tempered_allowed(temperature: jax.Array, logits: jax.Array) -> jax.Array:
    """Computes `tempered` without dividing -inf, whose derivative by the temperature is
    NaN."""
    allowed, largest = logits > -jnp.inf, logits.max(axis=-1, keepdims=True)
    z = _tempered(temperature, jnp.where(allowed, logits, largest))
    return jnp.where(allowed, z, -jnp.inf)


def _best_shapes(
    scores: jax.Array, *_: Any, count: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    lead = scores.shape[:-1]
    return floats(*lead, count), ints(*lead, count), floats(*lead, 1)


def _no_rows(scores: jax.Array, *_: Any, count: int) -> bool:
    return scores.ndim < 2 or scores.size == 0


@cpu_kernel("stree_best", outputs=_best_shapes, unsupported=_no_rows)
def best_scores(scores: jax.Array, *, count: int) -> tuple[jax.Array, ...]:
    """Returns the `count` largest of scores [..., V] float32.

    Returns:
      The scores [..., count], their indices [..., count] (of equal scores, the smallest
      index first), and the log-sum-exp of all scores [..., 1].
    """
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    if count > 2:
        return *lax.top_k(scores, count), total
    places = argmax(scores)[..., None]  # on a GPU it is faster than a sort
    if count == 2:
        place = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        others = jnp.where(place == places, -jnp.inf, scores)
        second = argmax(others)[..., None]
        # If all remaining scores are -inf, take the smallest unused index.
        second = jnp.where(second == places, (places == 0).astype(jnp.int32), second)
        places = jnp.concatenate([places, second], axis=-1)
    return jnp.take_along_axis(scores, places, axis=-1), places, total


@cpu_kernel("stree_best_drawn", outputs=_best_shapes, unsupported=_no_rows)
def best_drawn(
    logits: jax.Array, temperature: jax.Array, noise: jax.Array, *, count: int
) -> tuple[jax.Array, ...]:
    """Applies `best_scores` to tempered logits plus noise.

    Args:
      logits: [B, Q, V] float32.
      temperature: [B] float32. Rows with 0 are greedy and get no noise.
      noise: [B, V] float32.
    """
    noise = jnp.where(temperature[:, None] == 0, 0.0, noise)
    scores = tempered(temperature, logits) + noise[:, None]
    return best_scores.definition(scores, count=count)


def log_softmax(scores: jax.Array) -> jax.Array:
    """Returns log-probabilities [..., V] of scores [..., V] float32.

    On CPUs with kernels the bits of a row do not depend on the other rows.
    """
    return scores - best_scores(scores, count=1)[2]


@cpu_kernel(
    "stree_row_sums",
    outputs=lambda x: floats(*x.shape[:-1], 1),
    unsupported=lambda x: x.ndim < 2 or x.size == 0,
)
def row_sums(x: jax.Array) -> jax.Array:
    """Returns the sums [..., 1] of the rows of x [..., V] float32.

    On CPUs with kernels the bits of a row do not depend on the other rows.
    """
    return x.sum(axis=-1, keepdims=True)
