"""Heads that predict only some of the tokens, for models that draft.

A draft model with a large vocabulary reads most of its bytes for the head. Tokens that
a head leaves out are never drafted, but the target can still choose them.

Letters: V tokens of the vocabulary, D rows of the head.
"""

import jax
import jax.numpy as jnp


def scattered(logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
    """Returns logits [..., V] float32, which are -inf for tokens without a row.

    Args:
      logits: [..., D] float32.
      ids: [D] int32. Tokens of the rows, all different.
      vocab_size: V.
    """
    empty = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., ids].set(logits, mode="drop", unique_indices=True)
