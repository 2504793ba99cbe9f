"""What each row of a batch asks for: how to draw, how much, and when to stop."""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import ModelConfig
from stree_jax.sampling.distribution import SamplingRows, processed


@struct.dataclass
class StopStrings:
    """Automata that find stop strings token by token (`sampling.stop_strings`).

    Attributes:
      table: [R, S, V] int32, the state after a token, -1 once a string is complete;
        its last row is all -1, so that -1 stays.
      which: [B] int32, a row's automaton among R.
    """

    table: jax.Array
    which: jax.Array


@struct.dataclass
class Requests:
    """Wishes of B rows; constant while they are decoded.

    Attributes:
      limit: [B] int32, most new tokens.
      least: [B] int32, new tokens before a stop token or string may end a row, or
        None where no row wants any.
      stop_tokens: [B, n] int32, padded with -1.
      strings: stop strings, or None.
      sampling: how rows are sampled; None: all are greedy.
    """

    limit: jax.Array
    least: jax.Array | None
    stop_tokens: jax.Array
    strings: StopStrings | None
    sampling: SamplingRows | None


def allowed(
    config: ModelConfig, requests: Requests, logits: jax.Array, index: jax.Array
) -> jax.Array:
    """Logits [B, Q, num_tokens]: without the rows that only pad the vocabulary, and
    with -inf for stop tokens that would come before `least`.

    Args:
      logits: [B, Q, V] float32.
      index: [B, Q] int32, the output place of the token that they predict.
    """
    logits = logits[..., : config.num_tokens]
    if requests.least is None:
        return logits
    batch, _, V = logits.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    stops = jnp.where(requests.stop_tokens < 0, V, requests.stop_tokens)
    stop = jnp.zeros((batch, V), bool).at[row, stops].set(True, mode="drop")
    early = index < requests.least[:, None]
    return jnp.where(stop[:, None] & early[..., None], -jnp.inf, logits)


def scores(
    config: ModelConfig,
    requests: Requests,
    logits: jax.Array,
    index: jax.Array,
    seen: jax.Array | None,
) -> jax.Array:
    """What the next token is chosen by, for target and drafter alike.

    Log-probabilities of the processed distribution; in a greedy batch just the logits
    that are allowed, whose argmax is the same.

    Args:
      logits: [B, Q, V] float32.
      index: [B, Q] int32, the output place of the token that they predict.
      seen: [B, Q, num_tokens] bool, tokens in the text before, or None.

    Returns:
      [B, Q, num_tokens] float32.
    """
    logits = allowed(config, requests, logits, index)
    if requests.sampling is None:
        return logits
    return processed(requests.sampling, logits, seen)


def with_path(seen: jax.Array, path: jax.Array) -> jax.Array:
    """Tokens seen [B, V] and those on each node's path [B, Q, D], as [B, Q, V]."""
    batch, Q, _ = path.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    q = jnp.arange(Q, dtype=jnp.int32)[None, :, None]
    here = jnp.broadcast_to(seen[:, None], (batch, Q, seen.shape[1]))
    return here.at[b, q, path].set(True)
