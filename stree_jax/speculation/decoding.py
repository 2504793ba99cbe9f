"""A batch in the middle of being decoded, and how a step's gain is written down.

Letters: B rows, T nodes, M depth of the deepest tree, O room for output, V tokens of
the vocabulary, K trees of the policy's menu.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Pending, State
from stree_jax.sampling import logprobs
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.draft import DRAFTER, TARGET, Draft
from stree_jax.speculation.drafter import DraftState

PolicyState = Any  # a policy's own pytree

OPEN = -1  # of `Decoding.choice`

# Values of `Decoding.finish`.
RUNNING, STOP_TOKEN, OUT_OF_LENGTH, STOP_STRING = 0, 1, 2, 3


@struct.dataclass
class Decoding:
    """All of it lives on the device.

    Attributes:
      requests: what each row asks for.
      state: the target's, up to (not including) `pending`.
      pending: the last accepted path, replayed at the start of the next step.
      drafting: the drafter's state.
      policy: the policy's state.
      choice: [] int32, place in the policy's menu of the next tree; `OPEN` until the
        policy has chosen.
      root: [B] int32, the last token of the text, which the target reads next.
      tokens: [B, O] int32, the output so far, padded with 0.
      length: [B] int32, valid tokens in it.
      seen: [B, V] bool, tokens in prompt and output; None without a penalty.
      stop_state: [B] int32, state of the automaton of stop strings, or None.
      logprobs: of the output, or None where they are not asked for.
      finish: [B] int32, RUNNING, STOP_TOKEN, OUT_OF_LENGTH or STOP_STRING.
      origin: [B, O] uint8, where each token of the output comes from, see `draft`.
      used: [B, K] int32, target calls made while the row was running, by tree of the
        menu.
      gained: [B, M + 2] int32, how often a call gained 0 .. M + 1 tokens.
      margin: [B] float32, smallest `Accepted.margin` of any token of the output.
    """

    requests: Requests
    state: State
    pending: Pending
    drafting: DraftState
    policy: PolicyState
    choice: jax.Array
    root: jax.Array
    tokens: jax.Array
    length: jax.Array
    seen: jax.Array | None
    stop_state: jax.Array | None
    logprobs: LogProbs | None
    finish: jax.Array
    origin: jax.Array
    used: jax.Array
    gained: jax.Array
    margin: jax.Array

    @property
    def calls(self) -> jax.Array:
        """[B] int32, target calls made while the row was running."""
        return self.used.sum(axis=1, dtype=jnp.int32)

    def distribution(self, num_tokens: int) -> Distribution:
        """What the tokens below the root are chosen by."""
        return Distribution(self.requests, self.length, self.seen, num_tokens)


class Stop(NamedTuple):
    """Where rows stand after a cut: `finish` and `stop_state` of a `Decoding`."""

    finish: jax.Array
    state: jax.Array | None


def follow_stop_strings(d: Decoding, tokens: jax.Array) -> jax.Array | None:
    """States [B, M + 1] of the automata after each new token; -1 is a match.

    The text that they read begins at `min_new_tokens`, where a row may first stop.
    """
    automata, first = d.requests.stop_strings, d.requests.min_new_tokens
    if automata is None or d.stop_state is None:
        return None

    def feed(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        token, place = inputs
        after = automata.table[automata.automaton, state, token]  # from -1 again to -1
        if first is not None:
            after = jnp.where(place < first, 0, after)
        return after, after

    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    places = d.length[:, None] + index
    return lax.scan(feed, d.stop_state, (tokens.T, places.T))[1].T


def cut_at_stops(d: Decoding, accepted: Accepted) -> tuple[Accepted, Stop]:
    """Cut what was accepted at the first stop token or string and at the limit.

    Returns:
      `accepted` with the length after the cut (0 for finished rows), and what stopped.
    """
    running, tokens = d.finish == RUNNING, accepted.tokens
    width = tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None]

    def first(stops: jax.Array) -> jax.Array:
        return jnp.where(stops, index, width).min(axis=1)

    stop_tokens = d.requests.stop_tokens[:, None]
    by_token = first((tokens[..., None] == stop_tokens).any(axis=-1))
    states, by_string = follow_stop_strings(d, tokens), jnp.full_like(by_token, width)
    if states is not None:
        by_string = first(states < 0)

    room = d.requests.max_new_tokens - d.length
    length = jnp.minimum(accepted.length, jnp.minimum(by_token, by_string) + 1)
    length = jnp.minimum(length, room)
    finish = jnp.where(length == room, OUT_OF_LENGTH, RUNNING)
    finish = jnp.where(by_token < length, STOP_TOKEN, finish)
    finish = jnp.where(by_string < length, STOP_STRING, finish)  # texts leave it out
    finish = jnp.where(running, finish, d.finish)
    stop_state = d.stop_state
    if states is not None and stop_state is not None:
        last = jnp.maximum(length - 1, 0)[:, None]
        after = jnp.take_along_axis(states, last, axis=1)[:, 0]
        stop_state = jnp.where(running, after, stop_state)
    length = jnp.where(running, length, 0)
    return replace(accepted, length=length), Stop(finish, stop_state)


def record_step(
    d: Decoding,
    draft: Draft,
    logits: jax.Array,
    accepted: Accepted,
    stop: Stop,
    dist: Distribution,
) -> Decoding:
    """Write down what a step gained: the output, its log-probabilities, statistics.

    Args:
      draft: the step's tree of T nodes.
      logits: [B, T, >= V] float32, the target's.
      accepted, stop: after the cut.
      dist: what the tokens below the root were chosen by.
    """
    length, tokens = accepted.length, accepted.tokens
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    depth = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    counts = depth[None] < length[:, None]
    places = jnp.where(counts, d.length[:, None] + depth[None], d.tokens.shape[1])
    seen, lists = d.seen, d.logprobs
    if lists is not None:
        on_path = jnp.take_along_axis(logits, accepted.path[..., None], axis=1)
        path = jnp.take_along_axis(draft.tokens, accepted.path, axis=1)
        above = path[:, jnp.minimum(depth[:, None], depth[None])]  # [B, M + 1, M + 1]
        chosen_by = dist.scores(on_path, depth[None], above)
        raw = on_path[..., : dist.num_tokens]
        lists = logprobs.write(lists, raw, chosen_by, tokens, places)
    if seen is not None:
        text = jnp.where(counts, tokens, seen.shape[1])
        seen = seen.at[row, text].set(True, mode="drop")

    def write(old: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[place].set(new, mode="drop")  # by row: shardings stay

    last = jnp.maximum(length - 1, 0)[:, None]
    root = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    ran = (d.finish == RUNNING).astype(jnp.int32)
    margin = jnp.where(counts, accepted.margin, jnp.inf).min(axis=1)
    return replace(
        d,
        root=jnp.where(length > 0, root, d.root),
        tokens=jax.vmap(write)(d.tokens, places, tokens),
        length=d.length + length,
        seen=seen,
        stop_state=stop.state,
        logprobs=lists,
        finish=stop.finish,
        origin=jax.vmap(write)(d.origin, places, _origins(draft, accepted)),
        used=d.used.at[:, d.choice].add(ran),
        gained=d.gained.at[row[:, 0], length].add(ran),
        margin=jnp.minimum(d.margin, margin),
    )


def _origins(draft: Draft, accepted: Accepted) -> jax.Array:
    """Where the accepted tokens [B, M + 1] come from, uint8; nodes lead to the next."""
    after = jnp.pad(accepted.path[:, 1:], ((0, 0), (0, 1)))  # 0, the root: no draft
    if draft.origin is None:
        return jnp.where(after > 0, DRAFTER, TARGET).astype(jnp.uint8)
    origin = jnp.take_along_axis(draft.origin, after, axis=1)
    return jnp.where(after > 0, origin, jnp.uint8(TARGET))
