"""Log-probabilities of known tokens, without the logits of a whole text in memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.common.checks import check_not_forked, shown, with_hints
from stree_jax.common.rows import spread
from stree_jax.constraints.constraint import Constraint
from stree_jax.cpu_kernels import at_most
from stree_jax.generation.arguments import checked_tokens
from stree_jax.generation.scoring import read_chunks
from stree_jax.generation.token_arguments import (
    counts,
    given_routing,
    known,
    repeated_constraints,
    rows_of_constraint,
    rows_of_sampling,
    stop_table,
)
from stree_jax.models import PREFILL_CHUNK, Model, check_model, logits_of
from stree_jax.models.stack.routing import UNKNOWN
from stree_jax.sampling.best import log_softmax
from stree_jax.sampling.constraints import NONE, Constraints
from stree_jax.sampling.distribution import Distribution, marks_of, without_stops
from stree_jax.sampling.logprobs import of_tokens
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, SamplingRows
from stree_jax.speculation.loop import tokens_of
from stree_jax.speculation.on_mesh import rows_on

MOST_LOGITS = 2**24  # at once, a chunk of all rows; else row by row


@with_hints
def token_logprobs(
    model: Model,
    tokens: Any,
    lengths: Any = None,
    *,
    sampling: Sampling | SamplingRows | None = None,
    constraint: Constraint | Sequence[Constraint | None] | Constraints | None = None,
    prompt_lengths: Any = None,
    stop_tokens: Any = None,
    min_new_tokens: Any = 0,
    routing: Any = None,
) -> jax.Array:
    """Returns the log-probability of each token of each text, given those before it.

    It can be differentiated, and used inside `jax.jit`. Texts are read in chunks of 64
    tokens, so that logits [B, T, V] never exist; the backward pass computes each chunk
    again. On a CPU with the compiled kernels, the numbers are those of the rollout: bit
    for bit `GeneratedTokens.logprobs.raw` without `sampling` and `constraint`, and
    `processed` with those of the call.

    Args:
      model: the model.
      tokens: [B, T] ints, padded on the right.
      lengths: [B] ints in 1 .. T. If None, T.
      sampling: a `Sampling` for all rows, or `SamplingRows` of B rows: the
        log-probabilities are those after temperature, filters, biases and penalties,
        -inf for tokens that these exclude. Its keys are not used. If None, those of the
        model.
      constraint: what the output of each text must match, as in `generate_tokens`: the
        log-probabilities are those after its masks, -inf for a token that breaks it.
        Constraints of B / n prompts are for the n rows of each prompt.
      prompt_lengths: [B] ints in 1 .. `lengths`: tokens of each text that are its
        prompt, for which the result is then 0. Needed with `constraint` and
        `min_new_tokens`, which begin behind the prompt, and with presence and frequency
        penalties, which count only the output. (Without it, those of `SamplingRows`
        count the prompt, too.)
      stop_tokens: with `constraint` or `min_new_tokens`, the tokens that may end the
        output, as in `generate_tokens`. If None, the model's stop tokens.
      min_new_tokens: an int or [B] ints, tokens of the output before which the
        log-probability of stop tokens is -inf, as in `generate_tokens`.
      routing: [B, T, L, k] ints, the k different experts that each token uses in each
        of the model's L mixtures, as in `Texts.routing`; -1 where routers choose. Their
        weights are still those of the model's routers, and have a gradient. If None,
        routers choose all experts.

    Returns:
      [B, T] float32. 0 for the first token, which nothing precedes, for tokens of
      prompts, and from `lengths` on.

    Raises:
      ValueError: a shape or type is wrong, or, outside `jit`, a value. Inside `jit`
        values are unknown, and ids and lengths are clipped to the valid range.

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
    given = T if lengths is None else lengths
    lengths = counts("lengths", given, batch, 1, T)
    prompt = least = None
    if not (isinstance(min_new_tokens, int) and min_new_tokens == 0):
        least = counts("min_new_tokens", min_new_tokens, batch, 0, T)
    if prompt_lengths is not None:
        prompt = counts("prompt_lengths", prompt_lengths, batch, 1, T)
        _check_prompts(prompt_lengths, given)
    elif least is not None:
        raise ValueError("prompt_lengths: want them, for min_new_tokens of the outputs")
    elif constraint is not None:
        raise ValueError("prompt_lengths: want them, since a constraint is for outputs")
    elif isinstance(sampling, Sampling):
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):
                problem = f"want no {name}, which counts outputs only"
                raise ValueError(f"sampling: {problem}, or prompt_lengths")
    zeros = jnp.zeros((batch,), jnp.int32)
    requests = Requests(
        max_new_tokens=zeros,
        min_new_tokens=least,
        stop_tokens=zeros[:, None],
        stop_strings=None,
        sampling=rows_of_sampling(sampling, None, batch, 1, model.config.num_tokens),
        constraints=_constraints(model, constraint, batch),
    )
    if requests.constraints is not None or least is not None:
        stops = stop_table(model, stop_tokens, batch)
        requests = replace(requests, stop_tokens=stops)
    elif stop_tokens is not None:
        raise ValueError("stop_tokens: only for a constraint or min_new_tokens")
    if routing is not None:
        routing = given_routing(model, routing, batch, T)
        routing = _whole_chunks(routing, UNKNOWN)
    padded = _whole_chunks(tokens, 0)
    found = _token_logprobs(model, padded, requests, prompt, routing)[:, : T - 1]
    found = jnp.pad(found, ((0, 0), (1, 0)))
    place = jnp.arange(T, dtype=jnp.int32)[None]
    first = jnp.int32(1) if prompt is None else prompt[:, None]
    return jnp.where((place >= first) & (place < lengths[:, None]), found, 0.0)


def _check_prompts(prompts: Any, lengths: Any) -> None:
    """Raises ValueError if known prompts are longer than their texts."""
    if any(not known(one) or spread(one) for one in (prompts, lengths)):
        return
    if (np.asarray(prompts) > np.asarray(lengths)).any():
        wanted = f"want at most the lengths of texts, {shown(lengths)}"
        raise ValueError(f"prompt_lengths: {wanted}, got {shown(prompts)}")


def _whole_chunks(table: jax.Array, padding: int) -> jax.Array:
    """Pads an array [B, T, ...] to a multiple of the chunk."""
    missing = -table.shape[1] % PREFILL_CHUNK
    widths = ((0, 0), (0, missing), *((0, 0),) * (table.ndim - 2))
    return jnp.pad(table, widths, constant_values=padding)


def _constraints(model: Model, constraint: Any, batch: int) -> Constraints | None:
    """Returns the automata of B rows, of constraints that may be by prompt."""
    prompts = batch
    if isinstance(constraint, Constraints):
        prompts = constraint.automaton.shape[0]
    elif isinstance(constraint, list | tuple):
        prompts = len(constraint)
    n = batch // prompts if prompts and batch % prompts == 0 else 1
    found = rows_of_constraint(model, constraint, batch // n)
    return None if found is None else repeated_constraints(found, n)


@jax.jit
def _token_logprobs(
    model: Model,
    tokens: jax.Array,
    requests: Requests,
    prompt: jax.Array | None,
    routing: jax.Array | None,
) -> jax.Array:
    """Returns the log-probability [B, T] of the token after each token [B, T]."""
    return rows_on(model, _chunks, tokens, requests, prompt, routing)


def _chunks(
    model: Model,
    tokens: jax.Array,
    requests: Requests,
    prompt: jax.Array | None,
    routing: jax.Array | None,
) -> jax.Array:
    (batch, T), V = tokens.shape, model.config.num_tokens
    counted, so_far, states = tokens, None, None
    if prompt is not None:  # tokens of the output, for penalties
        place = jnp.arange(T, dtype=jnp.int32)[None]
        counted = jnp.where(place < prompt[:, None], V, tokens)
    if (sampling := requests.sampling) is not None:
        # Nothing is drawn; chunks cannot carry typed keys through `lax.map`.
        sampling = replace(sampling, key=jnp.zeros((batch,), jnp.int32))
        if sampling.penalties is not None:
            so_far = jnp.broadcast_to(0 * tokens[:, :1], (batch, V))
            if prompt is not None:
                so_far = so_far + tokens_of(tokens, prompt, V).astype(jnp.int32)
    tables = requests.constraints
    if tables is not None and prompt is not None:
        states = _states(tables, tokens, prompt)
    early = None
    if requests.min_new_tokens is not None and prompt is not None:
        place = jnp.arange(1, T + 1, dtype=jnp.int32)[None]
        index = place - prompt[:, None]  # of the next token in the output
        early = (index >= 0) & (index < requests.min_new_tokens[:, None])
    # All rows share the tables, so they are not carried with the rows.
    by_row = replace(requests, sampling=sampling).with_shared(None)

    parts = jnp.roll(tokens, -1, axis=1), counted, states, early
    carry = so_far, by_row
    return read_chunks(_read, model, tables, tokens, carry, parts, routing)


def _read(
    model: Model,
    tables: Constraints | None,
    carry: tuple[jax.Array | None, Requests],
    hidden: jax.Array,
    parts: Any,
) -> tuple[Any, jax.Array]:
    """Returns `_of_chunk` of a chunk, and the carry after it; see `read_chunks`."""
    (so_far, by_row), (following, counted, states, early) = carry, parts
    size, V = counted.shape[0], model.config.num_tokens
    row = jnp.arange(size, dtype=jnp.int32)[:, None]
    if so_far is not None:
        so_far = so_far.at[row, counted[:, :1]].add(2, mode="drop")
    args = hidden, following, counted, states, early, so_far, by_row
    if at_most(counted.size * V, MOST_LOGITS):
        found = _of_chunk(model, tables, *args)
    else:
        each = jax.tree.map(lambda x: x[:, None], args)
        one_row = partial(_of_chunk, model, tables)
        found = jax.lax.map(lambda one: one_row(*one), each)[:, 0]
    if so_far is not None:
        so_far = so_far.at[row, counted[:, 1:]].add(2, mode="drop")
    return (so_far, by_row), found


def _states(
    constraints: Constraints, tokens: jax.Array, prompt: jax.Array
) -> jax.Array:
    """Returns the states [B, T] after the tokens of texts; `NONE` before the last token
    of a prompt, which is not constrained, and behind a token that is not allowed.

    Args:
      constraints: automata of the B rows.
      tokens: [B, T] int32.
      prompt: [B] int32. Lengths of the prompts.
    """

    def one(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        token, place = inputs
        state = constraints.after(state, token)
        state = jnp.where(place == prompt - 1, constraints.start, state)
        return state, state

    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    before = jnp.full_like(tokens[:, 0], NONE)
    return lax.scan(one, before, (tokens.T, places))[1].T


def _of_chunk(
    model: Model,
    tables: Constraints | None,
    hidden: jax.Array,
    following: jax.Array,
    counted: jax.Array,
    states: jax.Array | None,
    early: jax.Array | None,
    so_far: jax.Array | None,
    by_row: Requests,
) -> jax.Array:
    """Returns the log-probabilities [B, chunk] of the tokens after each of a chunk.

    Args:
      model: the model.
      tables: the automata of constraints, or None.
      hidden: [B, chunk, d] float32.
      following: [B, chunk] int32. The tokens after each of the chunk.
      counted: [B, chunk] int32. The tokens of the chunk that penalties count; V for
        others.
      states: [B, chunk] int32. States of the automata after each token.
      early: [B, chunk] bool. True if the next token has to be another one than the stop
        tokens; or None.
      so_far: [B, V] int32. `Distribution.counts` of the text up to the chunk's first
        token, and of the prompt; None without penalties.
      by_row: the requests, without tables.
    """
    V, (batch, width) = model.config.num_tokens, counted.shape
    logits = logits_of(model, hidden)[..., :V]
    stop = marks_of(by_row.stop_tokens, V)
    if tables is not None and states is not None and by_row.constraints is not None:
        rows = replace(tables, automaton=by_row.constraints.automaton)
        logits = jnp.where(rows.allowed(states, stop), logits, -jnp.inf)
    if early is not None:
        logits = without_stops(logits, stop, early, tables is not None)
    if by_row.sampling is not None:
        place = jnp.arange(width, dtype=jnp.int32)
        zeros = jnp.zeros((batch,), jnp.int32)
        path = counted[:, jnp.minimum(place[:, None], place[None])]
        masked = replace(by_row, constraints=None, min_new_tokens=None)
        dist = Distribution(masked, zeros, so_far, V)
        logits = dist.scores(logits, place[None], path)
    return of_tokens(log_softmax(logits), following)
