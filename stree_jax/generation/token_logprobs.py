"""Log-probabilities of known tokens, without the logits of a whole text in memory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.common.checks import check_not_forked, with_hints
from stree_jax.cpu_kernels import at_most
from stree_jax.generation.arguments import checked_tokens
from stree_jax.generation.scoring import read_chunks
from stree_jax.generation.token_arguments import counts, rows_of_sampling
from stree_jax.models import PREFILL_CHUNK, Model, check_model, logits_of
from stree_jax.sampling.best import log_softmax
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.logprobs import of_tokens
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, SamplingRows
from stree_jax.speculation.on_mesh import rows_on

MOST_LOGITS = 2**24  # at once, a chunk of all rows; else row by row


@with_hints
def token_logprobs(
    model: Model,
    tokens: Any,
    lengths: Any = None,
    *,
    sampling: Sampling | SamplingRows | None = None,
) -> jax.Array:
    """Returns the log-probability of each token of each text, given those before it.

    It can be differentiated, and used inside `jax.jit`. Texts are read in chunks of 64
    tokens, so that logits [B, T, V] never exist; the backward pass computes each chunk
    again. On a CPU with the compiled kernels, the numbers are those of the rollout: bit
    for bit `GeneratedTokens.logprobs.raw` without `sampling`, and `processed` with the
    sampling of the call.

    Args:
      model: the model.
      tokens: [B, T] ints, padded on the right.
      lengths: [B] ints in 1 .. T. If None, T.
      sampling: a `Sampling` for all rows, or `SamplingRows` of B rows: the
        log-probabilities are those after temperature, filters, biases and repetition
        penalty, -inf for tokens that these exclude. Its keys are not used. Presence and
        frequency penalties of `SamplingRows` count the prompt, too; `Sampling` with
        them is refused. If None, those of the model.

    Returns:
      [B, T] float32. 0 for the first token, which nothing precedes, and from `lengths`
      on.

    Raises:
      ValueError: a shape or type is wrong, or, outside `jit`, a value.

    Example:
      >>> model = stree_jax.load("demo")
      >>> stree_jax.token_logprobs(model, [[60, 61, 62]]).shape
      (1, 3)
    """
    check_not_forked()
    check_model("model", model)
    tokens = jnp.asarray(checked_tokens("tokens", tokens, model.config, 2))
    if tokens.size == 0:
        raise ValueError(f"tokens: want at least one token, got shape {tokens.shape}")
    batch, T = tokens.shape
    lengths = counts("lengths", T if lengths is None else lengths, batch, 1, T)
    if isinstance(sampling, Sampling):
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):
                raise ValueError(f"sampling: want no {name}, which counts outputs only")
    rows = rows_of_sampling(sampling, None, batch, 1, model.config.num_tokens)
    padded = jnp.pad(tokens, ((0, 0), (0, -T % PREFILL_CHUNK)), mode="edge")
    found = _token_logprobs(model, padded, rows)[:, : T - 1]
    found = jnp.pad(found, ((0, 0), (1, 0)))
    place = jnp.arange(T, dtype=jnp.int32)[None]
    return jnp.where((place > 0) & (place < lengths[:, None]), found, 0.0)


@jax.jit
def _token_logprobs(
    model: Model, tokens: jax.Array, rows: SamplingRows | None
) -> jax.Array:
    """Returns the log-probability [B, T] of the token after each token [B, T]."""
    return rows_on(model, _chunks, tokens, rows)


def _chunks(model: Model, tokens: jax.Array, rows: SamplingRows | None) -> jax.Array:
    batch, V = tokens.shape[0], model.config.num_tokens
    so_far = None
    if rows is not None:
        # Nothing is drawn; chunks cannot carry typed keys through `lax.map`.
        rows = replace(rows, key=jnp.zeros((batch,), jnp.int32))
        if rows.penalties is not None:
            so_far = jnp.broadcast_to(0 * tokens[:, :1], (batch, V))

    def read(carry: Any, hidden: jax.Array, both: Any) -> tuple[Any, jax.Array]:
        (so_far, rows), (part, following) = carry, both
        size = part.shape[0]
        row = jnp.arange(size, dtype=jnp.int32)[:, None]
        if so_far is not None:
            so_far = so_far.at[row, part[:, :1]].add(2, mode="drop")
        args = hidden, part, following, so_far, rows
        if at_most(part.size * V, MOST_LOGITS):
            found = _of_chunk(model, *args)
        else:
            each = jax.tree.map(lambda x: x[:, None], args)
            found = jax.lax.map(lambda one: _of_chunk(model, *one), each)[:, 0]
        if so_far is not None:
            so_far = so_far.at[row, part[:, 1:]].add(2, mode="drop")
        return (so_far, rows), found

    both = tokens, jnp.roll(tokens, -1, axis=1)
    return read_chunks(model, tokens, read, (so_far, rows), both)


def _of_chunk(
    model: Model,
    hidden: jax.Array,
    tokens: jax.Array,
    following: jax.Array,
    so_far: jax.Array | None,
    rows: SamplingRows | None,
) -> jax.Array:
    """Returns the log-probabilities [B, chunk] of the tokens after each of a chunk.

    Args:
      model: the model.
      hidden: [B, chunk, d] float32.
      tokens, following: [B, chunk] int32, the chunk and the tokens after each of it.
      so_far: [B, V] int32, of the text up to the chunk's first token; None without
        penalties.
      rows: sampling settings, or None.
    """
    V, (batch, width) = model.config.num_tokens, tokens.shape
    logits = logits_of(model, hidden)[..., :V]
    if rows is not None:
        place = jnp.arange(width, dtype=jnp.int32)
        zeros = jnp.zeros((batch,), jnp.int32)
        requests = Requests(zeros, None, zeros[:, None], None, rows)
        path = tokens[:, jnp.minimum(place[:, None], place[None])]
        dist = Distribution(requests, zeros, so_far, V)
        logits = dist.scores(logits, place[None], path)
    return of_tokens(log_softmax(logits), following)
