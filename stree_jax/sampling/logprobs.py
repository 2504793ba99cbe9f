"""Log-probabilities of the tokens that became text, and of the most probable ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class LogProbs:
    """By output place, for O places; arrays of jax or NumPy, with or without [B].

    "Raw" is the target's own distribution; "processed" the one that tokens are chosen
    by, after penalty, temperature, filters and forbidden stop tokens (a greedy row has
    temperature 1 here).

    Attributes:
      raw, processed: [B, O] float32, of the token at that place.
      top_raw, top: [B, O, n] float32, the n largest of either, best first.
      top_raw_tokens, top_tokens: [B, O, n] int32, whose they are.
    """

    raw: Any
    processed: Any
    top_raw: Any
    top_raw_tokens: Any
    top: Any
    top_tokens: Any


def empty(batch: int, places: int, top: int) -> LogProbs:
    """Room for O places, filled with zeros."""
    one = jnp.zeros((batch, places), jnp.float32)
    values = jnp.zeros((batch, places, top), jnp.float32)
    tokens = jnp.zeros((batch, places, top), jnp.int32)
    return LogProbs(one, one, values, tokens, values, tokens)


def write(
    buffer: LogProbs,
    raw: jax.Array,
    processed: jax.Array,
    tokens: jax.Array,
    places: jax.Array,
) -> LogProbs:
    """Enter the tokens of one pass.

    Args:
      raw, processed: [B, D, V] float32, logits of either distribution, normalised here.
      tokens: [B, D] int32, the token chosen after each.
      places: [B, D] int32, where it stands in the output; O or more: nowhere.
    """
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]

    def enter(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row, places].set(new, mode="drop")

    def entries(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(z, tokens[..., None], axis=2)[..., 0]
        return chosen, *lax.top_k(z, buffer.top.shape[-1])

    raw_chosen, raw_top, raw_tokens = entries(raw)
    chosen, top, top_tokens = entries(processed)
    return LogProbs(
        raw=enter(buffer.raw, raw_chosen),
        processed=enter(buffer.processed, chosen),
        top_raw=enter(buffer.top_raw, raw_top),
        top_raw_tokens=enter(buffer.top_raw_tokens, raw_tokens),
        top=enter(buffer.top, top),
        top_tokens=enter(buffer.top_tokens, top_tokens),
    )
