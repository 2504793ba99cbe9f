"""Records log-probabilities of the output tokens and of the most probable ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.best import log_softmax


@register_for_export
@struct.dataclass
class LogProbs:
    """Log-probabilities at the O positions of an output.

    The arrays are jax or NumPy arrays, with or without the axis B. "Raw" is the
    target's distribution. "Processed" is the distribution from which tokens are chosen,
    after penalty, temperature, filters and forbidden stop tokens (with temperature 1
    for greedy rows).

    Attributes:
      raw, processed: [B, O] float32. Log-probabilities of the output tokens.
      top_raw, top: [B, O, n] float32. The n largest log-probabilities, raw and
        processed, best first.
      top_raw_tokens, top_tokens: [B, O, n] int32. The tokens of `top_raw` and `top`.
    """

    raw: Any
    processed: Any
    top_raw: Any
    top_raw_tokens: Any
    top: Any
    top_tokens: Any


def empty(batch: int, places: int, top: int) -> LogProbs:
    """Returns log-probabilities of zero for `places` positions."""
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
    """Writes log-probabilities of the D tokens that a target pass chose per row, both
    under the raw and the processed logits, and returns the new buffer.

    The n most probable tokens of both distributions are written as well.

    Args:
      buffer: log-probabilities at the O positions of the output.
      raw: [B, D, V] float32. Logits of the target, unnormalised.
      processed: [B, D, V] float32. Logits after penalty, temperature, filters and
        forbidden stop tokens, unnormalised.
      tokens: [B, D] int32. The tokens that were chosen from `processed`.
      places: [B, D] int32. Their positions in the output. Entries with a position of O
        or more are not written.
    """
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]

    def enter(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row, places].set(new, mode="drop")

    def entries(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        z = log_softmax(logits)
        return of_tokens(z, tokens), *lax.top_k(z, buffer.top.shape[-1])

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


def of_tokens(z: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the entries [B, D] of tokens [B, D] in log-probabilities [B, D, V]."""
    return jnp.take_along_axis(z, tokens[..., None], axis=2)[..., 0]
