"""The state of a batch during decoding, and how a step's tokens are added to it.

`step` explains the terms root, pending path and menu.

Letters: B rows, T nodes, M depth of the deepest tree, O size of the output buffer, V
tokens of the vocabulary, K trees in the policy's menu.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import cpu_kernel, ints, like
from stree_jax.models import Pending, State
from stree_jax.sampling import logprobs
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.logprobs import LogProbs
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.draft import DRAFTER, FORCED, TARGET, Draft
from stree_jax.speculation.drafter import DraftState

PolicyState = Any  # a policy's own pytree

OPEN = -1  # `Decoding.choice` if the policy has to choose

# Values of `Decoding.finish`.
RUNNING, STOP_TOKEN, OUT_OF_LENGTH, STOP_STRING, COMPLETE = 0, 1, 2, 3, 4


@struct.dataclass
class Decoding:
    """The state of a batch that is being decoded. All arrays are on the device.

    Attributes:
      requests: the options of each row: limits, stop tokens, sampling.
      state: the target's state before the pending path.
      pending: the pending path: the accepted path of the last step, which the next
        verification pass replays.
      drafting: the drafter's state.
      policy: the policy's state.
      choice: [] int32. Index of the next tree in the policy's menu; `OPEN` until the
        policy has chosen.
      root: [B] int32. The last token of the text, which the target reads next.
      tokens: [B, O] int32. The output so far, padded with 0.
      length: [B] int32. Number of valid tokens in the output.
      counts: [B, V] int32. How often the text contains each token, see
        `Distribution.counts`. None if no row has a penalty.
      stop_state: [B] int32. States of the automata of the stop strings. None if there
        are no stop strings.
      constraint_state: [B] int32. States of the automata of constraints. None if no row
        has a constraint.
      logprobs: log-probabilities of the output, or None if they are not requested.
      finish: [B] int32. RUNNING, STOP_TOKEN, OUT_OF_LENGTH, STOP_STRING, or COMPLETE if
        the constraint allows nothing more.
      origin: [B, O] uint8. What proposed each token of the output, an index into
        `draft.ORIGINS`.
      used: [B, K] int32. Number of target passes with each tree of the menu, while the
        row was running.
      gained: [B, M + 2] int32. `gained[b, n]` target passes added n tokens to row b.
        Tokens that `closed` adds are not counted.
      margin: [B] float32. Smallest `Accepted.margin` of the tokens of the output.
      routing: [B, S + O, L, k] int32. The experts that the target used for the tokens
        of the text, see `models.stack.routing`; S is the width of the prompts. None if
        it is not requested.
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
    counts: jax.Array | None
    stop_state: jax.Array | None
    constraint_state: jax.Array | None
    logprobs: LogProbs | None
    finish: jax.Array
    origin: jax.Array
    used: jax.Array
    gained: jax.Array
    margin: jax.Array
    routing: jax.Array | None = None

    @property
    def calls(self) -> jax.Array:
        """[B] int32. Target passes made while the row was running."""
        return self.used.sum(axis=1, dtype=jnp.int32)

    def distribution(self, num_tokens: int) -> Distribution:
        """Returns what decides the next tokens of each row: its sampling settings and
        the tokens so far.

        The result turns logits into the scores by which the target and the drafter
        choose the tokens below the root, see `Distribution.scores`.

        Args:
          num_tokens: V. Logits from this index on are padding of the vocabulary.
        """
        state = self.constraint_state
        depth = None if state is None else jnp.int32(0)
        return Distribution(
            self.requests, self.length, self.counts, num_tokens, state, depth
        )

    def __repr__(self) -> str:
        shape = getattr(self.tokens, "shape", None)
        return f"Decoding(tokens {shape}; fields: {', '.join(self.__annotations__)})"


class Stop(NamedTuple):
    """The new values of the fields of `Decoding` with the same names, from
    `cut_at_stops`."""

    finish: jax.Array
    stop_state: jax.Array | None
    constraint_state: jax.Array | None


def follow_stop_strings(d: Decoding, tokens: jax.Array) -> jax.Array | None:
    """Runs the automata that find stop strings over the accepted tokens.

    Tokens before position `min_new_tokens` are skipped, because a row may not stop
    there.

    Args:
      d: the batch before the step.
      tokens: [B, M + 1] int32. The accepted tokens.

    Returns:
      The automata's states [B, M + 1] int32 after each token, -1 from the token on that
      completes a stop string. None if there are no stop strings.
    """
    automata, first = d.requests.stop_strings, d.requests.min_new_tokens
    if automata is None or d.stop_state is None:
        return None

    def feed(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        token, place = inputs
        after = automata.table[automata.automaton, state, token]  # -1 stays -1
        if first is not None:
            after = jnp.where(place < first, 0, after)
        return after, after

    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    places = d.length[:, None] + index
    return lax.scan(feed, d.stop_state, (tokens.T, places.T))[1].T


def cut_at_stops(d: Decoding, accepted: Accepted) -> tuple[Accepted, Stop]:
    """Cuts the accepted tokens after the first stop token, after the token that
    completes a stop string or a constraint, and at the limit on new tokens.

    Args:
      d: the batch before the step.
      accepted: the result of the acceptance rule.

    Returns:
      `accepted` with the length after the cut (0 for finished rows), and the rows'
      finish reasons and automaton states.
    """
    limits = d.requests.max_new_tokens, d.requests.stop_tokens
    args = accepted.tokens, accepted.length, d.length, d.finish, *limits
    states = follow_stop_strings(d, accepted.tokens)
    constraints, inside = d.requests.constraints, None
    ends: list[tuple[jax.Array, int]] = []
    if constraints is not None and d.constraint_state is not None:
        inside = constraints.along(d.constraint_state, accepted.tokens)
        ends.append((_first(constraints.complete(inside)), COMPLETE))
    if states is not None:
        # The last reason takes precedence: a text is cut before a stop string.
        ends.append((_first(states < 0), STOP_STRING))
    length, finish = _cut(*args, ends) if ends else _cut_by_tokens(*args)

    def last(before: jax.Array | None, states: jax.Array | None) -> jax.Array | None:
        if before is None or states is None:
            return before
        end = jnp.maximum(length - 1, 0)[:, None]
        after = jnp.take_along_axis(states, end, axis=1)[:, 0]
        return jnp.where((d.finish == RUNNING) & (length > 0), after, before)

    stop = Stop(finish, last(d.stop_state, states), last(d.constraint_state, inside))
    return replace(accepted, length=length), stop


def _first(marks: jax.Array) -> jax.Array:
    """Returns the index [B] of the first True in each row of [B, M + 1] bool; M + 1 if
    there is no True."""
    width = marks.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.where(marks, index, width).min(axis=1)


@cpu_kernel(
    "stree_cut",
    outputs=lambda _, accepted, *__: (ints(*accepted.shape), ints(*accepted.shape)),
)
def _cut_by_tokens(
    tokens: jax.Array,
    accepted: jax.Array,
    before: jax.Array,
    finish: jax.Array,
    limit: jax.Array,
    stop_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes `_cut` without automata. The CPU kernel `stree_cut` replaces it."""
    return _cut(tokens, accepted, before, finish, limit, stop_tokens)


def _cut(
    tokens: jax.Array,
    accepted: jax.Array,
    before: jax.Array,
    finish: jax.Array,
    limit: jax.Array,
    stop_tokens: jax.Array,
    ends: Sequence[tuple[jax.Array, int]] = (),
) -> tuple[jax.Array, jax.Array]:
    """Cuts the accepted tokens at stops and at the limit.

    Args:
      tokens: [B, M + 1] int32. The accepted tokens.
      accepted: [B] int32. Number of accepted tokens.
      before: [B] int32. Number of tokens of the output so far.
      finish: [B] int32. `Decoding.finish` before the step.
      limit: [B] int32. Maximum number of tokens of the output.
      stop_tokens: [B, n] int32.
      ends: what else ends rows: [B] int32, index of the token that does, M + 1 if no
        token does; and the reason. Of several reasons at one token the last counts.

    Returns:
      The number of accepted tokens that are kept [B] int32, 0 for finished rows; and
      `Decoding.finish` [B] int32 after the step.
    """
    running, left = finish == RUNNING, limit - before
    by_token = _first((tokens[..., None] == stop_tokens[:, None]).any(axis=-1))
    length = jnp.minimum(jnp.minimum(accepted, by_token + 1), left)
    for at, _ in ends:
        length = jnp.minimum(length, at + 1)
    end = jnp.where(length == left, OUT_OF_LENGTH, RUNNING)
    end = jnp.where(by_token < length, STOP_TOKEN, end)
    for at, reason in ends:
        end = jnp.where(at < length, reason, end)
    return jnp.where(running, length, 0), jnp.where(running, end, finish)


def record_step(
    d: Decoding,
    draft: Draft,
    logits: jax.Array,
    accepted: Accepted,
    stop: Stop,
    dist: Distribution,
    trees: jax.Array,
) -> Decoding:
    """Adds the tokens of a step to the output, with log-probabilities and statistics.

    Args:
      d: the batch before the step.
      draft: the step's tree of T nodes.
      logits: [B, T, >= V] float32. The target's logits.
      accepted, stop: results of `cut_at_stops`.
      dist: the distribution of the tokens below the root.
      trees: [] or [B] int32. Index in the menu of the tree that each row used.
    """
    counts, lists = d.counts, d.logprobs
    if lists is not None or counts is not None:
        places = _places(d.length, accepted.length, accepted.tokens, d.tokens.shape[1])
    if lists is not None:
        depth = jnp.arange(accepted.tokens.shape[1], dtype=jnp.int32)
        on_path = jnp.take_along_axis(logits, accepted.path[..., None], axis=1)
        path = jnp.take_along_axis(draft.tokens, accepted.path, axis=1)
        above = path[:, jnp.minimum(depth[:, None], depth[None])]  # [B, M + 1, M + 1]
        chosen_by = dist.scores(on_path, depth[None], above)
        raw = on_path[..., : dist.num_tokens]
        lists = logprobs.write(lists, raw, chosen_by, accepted.tokens, places)
    if counts is not None:
        row = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
        text = jnp.where(places < d.tokens.shape[1], accepted.tokens, counts.shape[1])
        counts = counts.at[row, text].add(2, mode="drop")
    origin = draft.origin
    if origin is None:
        origin = jnp.full_like(draft.tokens, DRAFTER, jnp.uint8)
    before = Output(d.tokens, d.origin, d.root, d.length, d.used, d.gained, d.margin)
    trees, running = jnp.broadcast_to(trees, d.length.shape), d.finish == RUNNING
    after = _recorded(before, trees, running, accepted, origin)
    return replace(
        d,
        **after._asdict(),
        counts=counts,
        **stop._asdict(),
        logprobs=lists,
    )


def closed(d: Decoding) -> Decoding:
    """Ends the texts that can end in one way only, without a target pass: where a
    constraint allows a single token, and again a single one until the text is complete,
    the target has no choice.

    The target does not read these tokens. Batches with log-probabilities or routing are
    not changed, because these need a pass.
    """
    constraints = d.requests.constraints
    if constraints is None or d.constraint_state is None:
        return d
    if d.logprobs is not None or d.routing is not None:
        return d
    tokens = constraints.closing_after(d.constraint_state)
    length = (tokens >= 0).sum(axis=1, dtype=jnp.int32)
    # One entry more: `_recorded` takes the last one as a choice of the target.
    tokens = jnp.pad(jnp.maximum(tokens, 0), ((0, 0), (0, 1)))
    certain = jnp.full(tokens.shape, jnp.inf, jnp.float32)
    chosen = Accepted(jnp.ones_like(tokens), length, tokens, certain)
    chosen, stop = cut_at_stops(d, chosen)
    origin = jnp.full((tokens.shape[0], 2), FORCED, jnp.uint8)
    before = Output(d.tokens, d.origin, d.root, d.length, d.used, d.gained, d.margin)
    trees, no_pass = jnp.zeros_like(length), jnp.zeros_like(d.finish, bool)
    after = _recorded(before, trees, no_pass, chosen, origin)
    return replace(d, **after._asdict(), **stop._asdict())


def _places(
    before: jax.Array, count: jax.Array, tokens: jax.Array, size: int
) -> jax.Array:
    """Returns the output positions of tokens [B, M + 1] in a buffer of `size` tokens.
    Tokens from `count` [B] on are invalid and get the position `size`."""
    depth = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where(depth < count[:, None], before[:, None] + depth, size)


class Output(NamedTuple):
    """The fields of a `Decoding`, under the same names, that every step updates."""

    tokens: jax.Array
    origin: jax.Array
    root: jax.Array
    length: jax.Array
    used: jax.Array
    gained: jax.Array
    margin: jax.Array


@cpu_kernel(
    "stree_record",
    outputs=lambda before, *_: like(before),
    aliases={"before": None},
)
def _recorded(
    before: Output,
    choice: jax.Array,
    running: jax.Array,
    accepted: Accepted,
    origin: jax.Array,
) -> Output:
    """Adds the accepted tokens of a step to the output and updates the statistics.

    Args:
      before: the output and statistics before the step.
      choice: [B] int32. Index in the menu of the tree that each row used.
      running: [B] bool. True for rows that were not finished before the step.
      accepted: the accepted tokens, after the cut.
      origin: [B, T] uint8. What proposed each node, an index into `draft.ORIGINS`.
    """
    tokens, path, length = accepted.tokens, accepted.path, accepted.length
    places = _places(before.length, length, tokens, before.tokens.shape[1])
    # The node that proposed each accepted token; 0 for the last token, which no node
    # proposed: the target chose it.
    drafts = jnp.pad(path[:, 1:], ((0, 0), (0, 1)))
    drafted = jnp.take_along_axis(origin, drafts, axis=1)
    drafted = jnp.where(drafts > 0, drafted, jnp.uint8(TARGET))

    def write(old: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[place].set(new, mode="drop")  # per row, which keeps the sharding

    last = jnp.maximum(length - 1, 0)[:, None]
    end = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    row = jnp.arange(length.shape[0], dtype=jnp.int32)
    ran = running.astype(jnp.int32)
    counts = jnp.arange(path.shape[1], dtype=jnp.int32)[None] < length[:, None]
    least = jnp.where(counts, accepted.margin, jnp.inf).min(axis=1)
    return Output(
        jax.vmap(write)(before.tokens, places, tokens),
        jax.vmap(write)(before.origin, places, drafted),
        jnp.where(length > 0, end, before.root),
        before.length + length,
        jax.vmap(lambda row, tree, n: row.at[tree].add(n))(before.used, choice, ran),
        before.gained.at[row, length].add(ran),
        jnp.minimum(before.margin, least),
    )
