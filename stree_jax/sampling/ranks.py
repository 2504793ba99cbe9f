"""Ranks tokens among logits."""

import jax
import jax.numpy as jnp


def rank_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the ranks [S] int32 of tokens [S] by logits [S, V]; the best has rank 0.

    Of equal logits the smaller id comes first, as in the top-k of drafting.
    """
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    ids = jnp.arange(logits.shape[1], dtype=tokens.dtype)[None]
    ahead = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    return ahead.sum(axis=1, dtype=jnp.int32)
