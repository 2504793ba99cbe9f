"""Turns logits into the distribution from which the next token is drawn, row by row.

The order is that of Hugging Face and vLLM: biases, repetition penalty, frequency and
presence penalty, temperature, top-k, top-p, min-p.
Target and drafter are processed by the same function, so that an acceptance rule
compares the distributions from which the tokens are really drawn.

Letters: B rows, Q nodes of a tree, V tokens, D tokens on a path.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models.base.rounding import uncontracted
from stree_jax.sampling import threefry
from stree_jax.sampling.best import (
    best_drawn,
    best_scores,
    log_softmax,
    row_sums,
    tempered,
)
from stree_jax.sampling.constraints import NONE
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Filters, SamplingRows
from stree_jax.sampling.threefry import fold_in

# Purposes of random numbers. Each has a separate stream.
NOISE, DRAFT, ACCEPT = 0, 1, 2


@struct.dataclass
class Edges:
    """How close tokens are to being kept or dropped by the filters top-k, top-p and
    min-p.

    Attributes:
      distance: [B, Q, V] float32. The change of a token's logit (or of its probability,
        if top-p decides) that would change what the filters do. Positive for kept
        tokens, negative for dropped ones, and infinite without filters.
      unfiltered: [B, Q, V] float32. Scores of all tokens, including dropped ones. If
        they are log-probabilities, the probabilities of the kept tokens sum to 1.
    """

    distance: jax.Array
    unfiltered: jax.Array


@struct.dataclass
class Distribution:
    """The distribution of the tokens below a tree's root, for target and drafter.

    Attributes:
      requests: the requests of the B rows.
      output_place: [B] int32. Index in the output of the token after the root.
      counts: [B, V] int32. How often the text, up to the root, contains each token: 1
        if the prompt contains it, and 2 for each time that the output contains it. None
        if no row has a penalty.
      num_tokens: V. Logits beyond it are padding of the vocabulary.
      state: [B] int32. States of the automata of constraints after the text. None if no
        row has a constraint.
      depth: [] int32. Number of tokens below the root that `state` includes, or None
        without a state.
    """

    requests: Requests
    output_place: jax.Array
    counts: jax.Array | None
    num_tokens: int = struct.field(pytree_node=False)
    state: jax.Array | None = None
    depth: jax.Array | None = None

    @property
    def sampling(self) -> SamplingRows | None:
        """The sampling settings of the rows, or None if all rows are greedy."""
        return self.requests.sampling

    def scores(
        self,
        logits: jax.Array,
        depth: jax.Array,
        path: jax.Array | None = None,
        *,
        normalised: bool = True,
    ) -> jax.Array:
        """Computes the scores by which the token after each of Q nodes is chosen.

        They are log-probabilities of the processed distribution. In a greedy batch they
        are the allowed logits, whose argmax is the same.

        Args:
          logits: [B, Q, W] float32. The W of a drafter may be less than V.
          depth: [B, Q] or [1, Q] int32. Depths of the nodes; the root has depth 0.
          path: [B, Q, D] int32. Tokens from the root to each node, entry j at depth j;
            those beyond the node repeat others of its path. Penalties do not count
            entries of V. If None, `counts` has them, and constraints apply only to
            nodes at the depth of `state`.
          normalised: if False, only differences of scores matter, and the largest score
            may be 0.

        Returns:
          [B, Q, V] float32, -inf for tokens that cannot be chosen.
        """
        if self.sampling is None:
            return self._allowed(logits, depth, path)
        z = tempered(self.sampling.temperature, self._kept(logits, depth, path))
        return log_softmax(z) if normalised else z

    def scores_and_edges(
        self,
        logits: jax.Array,
        depth: jax.Array,
        path: jax.Array | None = None,
        *,
        normalised: bool = True,
    ) -> tuple[jax.Array, Edges]:
        """Returns `scores` of a sampled batch, and the distances of its filters."""
        assert self.sampling is not None  # a greedy batch has no filters
        logits = self._punished(logits, depth, path)
        z = tempered(self.sampling.temperature, logits)
        kept, distance = filtered_and_distance(self.sampling.filters, z)
        if not normalised:
            return kept, Edges(distance, z)
        total = best_scores(kept, count=1)[2]
        return kept - total, Edges(distance, z - total)

    def best(
        self,
        logits: jax.Array,
        depth: jax.Array,
        count: int,
        path: jax.Array | None = None,
        *,
        drawn: bool = True,
    ) -> Sequence[jax.Array]:
        """Returns the best tokens after nodes of one depth, by unnormalised `scores`.

        Args:
          logits: [B, Q, W] float32. The W of a drafter may be less than V.
          depth: [] int32. Depth of the nodes.
          count: number of tokens.
          path: as in `scores`.
          drawn: if True, the target's sampling noise is added for sampled rows.

        Returns:
          Scores, tokens and log-sum-exp, as `best_scores`.
        """
        depths = jnp.broadcast_to(depth, (1, logits.shape[1]))
        if self.sampling is None or not drawn:
            scores = self.scores(logits, depths, path, normalised=False)
            return best_scores(scores, count=count)
        kept = self._kept(logits, depths, path)
        return best_drawn(
            kept, self.sampling.temperature, self._gumbel_of(depth), count=count
        )

    def draw(self, logits: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws the target's token after a node.

        Args:
          logits: [B, W] float32 with W >= V.
          depth: [] int32. Depth of the node.

        Returns:
          The token [B] int32, and how much scores would have to change for another
          token to be drawn [B] float32, see `choice_margin`.
        """
        assert self.sampling is not None  # greedy batches have `accept_greedy`
        logits, filters = logits[:, None], self.sampling.filters
        best, tokens, _ = self.best(logits, depth, 2)
        token, lead = tokens[:, 0, 0], best[:, 0, 0] - best[:, 0, 1]
        if filters is None:
            return token, lead

        def by_edges(logits: jax.Array) -> jax.Array:
            depths = depth[None, None]
            z, edges = self.scores_and_edges(logits, depths, normalised=False)
            noise = self.noise(depth)
            return choice_margin(z[:, 0] + noise, edges, noise, token)

        return token, lax.cond(filters.any(), by_edges, lambda _: lead, logits)

    def _kept(
        self, logits: jax.Array, depth: jax.Array, path: jax.Array | None
    ) -> jax.Array:
        """Returns logits [B, Q, V] before temperature, -inf for forbidden tokens."""
        assert self.sampling is not None
        logits = self._punished(logits, depth, path)
        temperature, filters = self.sampling.temperature, self.sampling.filters
        if filters is None:
            return logits

        def some(logits: jax.Array) -> jax.Array:
            kept, _ = _filters(filters, tempered(temperature, logits))
            return jnp.where(kept, logits, -jnp.inf)

        return lax.cond(filters.any(), some, lambda logits: logits, logits)

    def _punished(
        self, logits: jax.Array, depth: jax.Array, path: jax.Array | None
    ) -> jax.Array:
        """Returns logits [B, Q, V] after biases and penalties, -inf for tokens that are
        not allowed."""
        assert self.sampling is not None
        logits, counts = self._allowed(logits, depth, path), self._counts(depth, path)
        if self.sampling.bias is not None:
            logits = logits + self.sampling.bias[:, None, : self.num_tokens]
        if (own := self.sampling.penalties) is None or counts is None:
            return logits
        repetition = _by_row(own.repetition)
        less = jnp.where(logits > 0, logits / repetition, logits * repetition)
        less = uncontracted(less)
        times = (counts >> 1).astype(jnp.float32)  # in the output
        less -= uncontracted(_by_row(own.frequency) * times)
        less -= jnp.where(times > 0, _by_row(own.presence), 0.0)
        return jnp.where(counts > 0, less, logits)

    def _allowed(
        self, logits: jax.Array, depth: jax.Array, path: jax.Array | None
    ) -> jax.Array:
        """Returns logits [B, Q, V], -inf for stop tokens before `min_new_tokens`, for
        tokens that break a constraint, and for those that the drafter does not have.
        Stop tokens stay if a constraint allows no others."""
        logits, r = logits[..., : self.num_tokens], self.requests
        if (missing := self.num_tokens - logits.shape[-1]) > 0:
            width = ((0, 0),) * (logits.ndim - 1) + ((0, missing),)
            logits = jnp.pad(logits, width, constant_values=-jnp.inf)
        if r.min_new_tokens is None and r.constraints is None:
            return logits
        stop = marks_of(r.stop_tokens, logits.shape[2])
        if r.constraints is not None:
            logits = self._constrained(logits, self.states(depth, path), stop)
        if r.min_new_tokens is None:
            return logits
        place = self.output_place[:, None] + depth
        early = place < r.min_new_tokens[:, None]
        return without_stops(logits, stop, early, r.constraints is not None)

    def _constrained(
        self, logits: jax.Array, states: jax.Array, stop: jax.Array
    ) -> jax.Array:
        """Returns logits [B, Q, V], -inf for tokens that break a constraint.

        Args:
          logits: [B, Q, V] float32.
          states: [B, Q] int32. States of the automata after the nodes.
          stop: [B, V] bool. The stop tokens of each row.
        """
        constraints = self.requests.constraints
        assert constraints is not None

        def some(logits: jax.Array) -> jax.Array:
            allowed = constraints.allowed(states, stop)
            return jnp.where(allowed, logits, -jnp.inf)

        return lax.cond((states >= 0).any(), some, lambda logits: logits, logits)

    def states(self, depth: jax.Array, path: jax.Array | None) -> jax.Array:
        """Returns the states [B, Q] int32 of the automata of constraints after nodes;
        `NONE` where a state is unknown, because there is no path.

        Args:
          depth, path: as in `scores`.
        """
        assert self.state is not None and self.requests.constraints is not None
        shape = self.state.shape[0], depth.shape[1]
        before = jnp.broadcast_to(self.state[:, None], shape)
        if path is None:
            return jnp.where(depth == self.depth, before, NONE)
        if path.shape[2] == 1:
            return before
        after = self.requests.constraints.along(before, path[..., 1:])
        last = jnp.broadcast_to(jnp.maximum(depth - 1, 0), shape)[..., None]
        after = jnp.take_along_axis(after, last, axis=2)[..., 0]
        return jnp.where(depth > 0, after, before)

    def _counts(self, depth: jax.Array, path: jax.Array | None) -> jax.Array | None:
        """Returns `counts` [B, Q, V] (or [B, 1, V]) of the text up to each node."""
        if self.counts is None:
            return None
        if path is None:
            return self.counts[:, None]
        batch, Q, D = path.shape
        b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        q = jnp.arange(Q, dtype=jnp.int32)[None, :, None]
        here = jnp.broadcast_to(self.counts[:, None], (batch, Q, self.num_tokens))
        # `counts` has the token of the root, at place 0, already.
        place = jnp.arange(D, dtype=jnp.int32)[None, None]
        below = (place > 0) & (place <= depth[..., None])
        return here.at[b, q, path].add(jnp.where(below, 2, 0), mode="drop")

    def after(self, token: jax.Array) -> "Distribution":
        """Returns the distribution after one more token [B]."""
        found = self
        if self.counts is not None:
            row = jnp.arange(token.shape[0], dtype=jnp.int32)
            found = replace(found, counts=self.counts.at[row, token].add(2))
        if self.state is not None and self.depth is not None:
            assert self.requests.constraints is not None
            after = self.requests.constraints.after(self.state, token)
            found = replace(found, state=after, depth=self.depth + 1)
        return found

    def keys(self, purpose: int, depth: jax.Array) -> jax.Array:
        """Returns keys [B] for one purpose and the token after nodes of depth []."""
        assert self.sampling is not None  # greedy rows draw nothing

        def one(key: jax.Array, place: jax.Array) -> jax.Array:
            return fold_in(fold_in(key, purpose), place)

        return jax.vmap(one)(self.sampling.key, self.output_place + depth)

    def noise(self, depth: jax.Array) -> jax.Array:
        """Returns the Gumbel noise [B, V] of the target after nodes of one depth.

        The noise depends on the position in the output only, so that plain decoding
        draws the same noise there.
        """
        assert self.sampling is not None  # greedy rows draw nothing
        return _but_greedy(self.sampling.greedy, self._gumbel_of(depth))

    def _gumbel_of(self, depth: jax.Array) -> jax.Array:
        """Returns `noise` for all rows, including greedy ones."""
        assert self.sampling is not None
        place = self.output_place + depth
        numbers = jnp.stack([jnp.full_like(place, NOISE), place], axis=1)
        words = jax.random.key_data(self.sampling.key)
        return threefry.noise(words, numbers, size=self.num_tokens)

    def gumbel(self, keys: jax.Array) -> jax.Array:
        """Returns Gumbel noise [B, ..., V] of keys [B, ...]; 0 for greedy rows.

        `argmax(log_probs + noise)` is a draw, and the k largest are k draws without
        replacement in the order in which they were drawn. For greedy rows these are the
        most probable tokens.
        """
        assert self.sampling is not None
        words = jax.random.key_data(keys.reshape(-1))
        none = jnp.zeros((words.shape[0], 0), jnp.int32)
        noise = threefry.noise(words, none, size=self.num_tokens)
        noise = noise.reshape(*keys.shape, self.num_tokens)
        return _but_greedy(self.sampling.greedy, noise)


def marks_of(stop_tokens: jax.Array, num_tokens: int) -> jax.Array:
    """Returns True for the stop tokens of each row [B, V] bool; `stop_tokens` [B, n]
    int32 is padded with -1."""
    row = jnp.arange(stop_tokens.shape[0], dtype=jnp.int32)[:, None]
    stops = jnp.where(stop_tokens < 0, num_tokens, stop_tokens)
    marks = jnp.zeros((stop_tokens.shape[0], num_tokens), bool)
    return marks.at[row, stops].set(True, mode="drop")


def _but_greedy(greedy: jax.Array, noise: jax.Array) -> jax.Array:
    """Sets noise [B, ...] to 0 in greedy rows [B]."""
    return jnp.where(greedy.reshape(-1, *[1] * (noise.ndim - 1)), 0.0, noise)


def _by_row(values: jax.Array) -> jax.Array:
    """Reshapes [B] to [B, 1, 1], to broadcast against [B, Q, V]."""
    return values[:, None, None]


def without_stops(
    logits: jax.Array, stop: jax.Array, early: jax.Array, constrained: bool
) -> jax.Array:
    """Returns logits [B, Q, V], -inf for stop tokens where the text may not end.

    Args:
      logits: [B, Q, V] float32.
      stop: [B, V] bool. The stop tokens of each row.
      early: [B, Q] bool. True if the next token has to be another one.
      constrained: True if constraints may allow nothing but stop tokens, which then
        stay.
    """
    later = jnp.where(stop[:, None] & early[..., None], -jnp.inf, logits)
    if not constrained:
        return later
    some = (later > -jnp.inf).any(axis=-1, keepdims=True)
    return jnp.where(some, later, logits)


def filtered_and_distance(
    filters: Filters | None, z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `tempered` logits [B, Q, V], -inf for tokens that are filtered out, and
    `Edges.distance`. A greedy row's token is the argmax of the logits."""

    def some(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert filters is not None
        kept, distance = _filters(filters, z)
        return jnp.where(kept, z, -jnp.inf), distance

    def whole(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        return z, jnp.full_like(z, jnp.inf)

    return whole(z) if filters is None else lax.cond(filters.any(), some, whole, z)


def _threshold(bits: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """Finds the largest bound such that the elements above it have enough weight.

    It is found bit by bit. A sort would cost many times as much, and would break ties
    by index.

    Args:
      bits: [B, Q, V] uint32, ordered as the logits are.
      weight: [B, Q, V] float32, at least 0.
      need: [B, 1, 1] float32; infinity (off) gives 0, which keeps everything.

    Returns:
      [B, Q, 1] uint32: sum(weight where bits >= bound) >= need.
    """

    def bit(i: jax.Array, bound: jax.Array) -> jax.Array:
        more = bound | (jnp.uint32(1) << (jnp.uint32(31) - jnp.asarray(i, jnp.uint32)))
        reached = row_sums(jnp.where(bits >= more, weight, 0.0))
        return jnp.where(reached >= need, more, bound)

    start = jnp.zeros((*bits.shape[:-1], 1), jnp.uint32)
    return lax.fori_loop(0, 32, bit, start)


def _filters(filters: Filters, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies top-k, then top-p to the remaining tokens, then min-p.

    Args:
      z: [B, Q, V] float32. Logits, shifted so that the largest is 0.

    Returns:
      A mask of the kept tokens [B, Q, V] bool, and `Edges.distance` of all tokens.
    """
    z = jnp.maximum(z, jnp.finfo(jnp.float32).min)  # differences of infinities are NaN
    raw = lax.bitcast_convert_type(z, jnp.uint32)
    bits = jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))
    top_k = jnp.where(filters.top_k > 0, filters.top_k.astype(jnp.float32), jnp.inf)
    by_k = bits >= _threshold(bits, jnp.ones_like(z), _by_row(top_k))
    p = jnp.exp(log_softmax(jnp.where(by_k, z, -jnp.inf)))
    top_p = _by_row(jnp.where(filters.top_p < 1, filters.top_p, jnp.inf))
    by_p = by_k & (bits >= _threshold(bits, p, top_p))
    min_z = jnp.log(_by_row(filters.min_p))
    kept = by_p & (z >= min_z)
    distance = jnp.minimum(_order_distance(z, by_k), _mass_distance(z, p, by_p, top_p))
    return kept, jnp.minimum(distance, z - min_z)


def _order_distance(z: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns, for each kept token, its distance to the largest dropped one, and for
    each dropped token, its (negative) distance to the smallest kept one."""
    last = jnp.where(kept, z, jnp.inf).min(axis=-1, keepdims=True)
    first = jnp.where(kept, -jnp.inf, z).max(axis=-1, keepdims=True)
    return jnp.where(kept, z - first, z - last)


def _mass_distance(
    z: jax.Array, p: jax.Array, kept: jax.Array, top_p: jax.Array
) -> jax.Array:
    """Returns `_order_distance`, or less if the mass of the kept tokens is near top_p.

    The last kept token would be dropped if the mass of those before it reached top_p.
    The first dropped token would be kept if the mass of the kept ones fell below it.
    """
    distance = _order_distance(z, kept)
    mass = row_sums(jnp.where(kept, p, 0.0))
    goes = p + top_p - mass
    comes = top_p - mass
    nearest = jnp.where(kept, distance, jnp.inf).min(axis=-1, keepdims=True)
    last = kept & (distance == nearest)
    nearest = jnp.where(kept, -jnp.inf, distance).max(axis=-1, keepdims=True)
    first = ~kept & (distance == nearest)
    distance = jnp.where(last, jnp.minimum(distance, goes), distance)
    return jnp.where(first, jnp.maximum(distance, comes), distance)


def top2_margin(scores: jax.Array, best: jax.Array) -> jax.Array:
    """Returns the gap [...] between the largest of scores [..., V], at index `best`,
    and the second largest."""
    place = lax.broadcasted_iota(best.dtype, scores.shape, scores.ndim - 1)
    others = jnp.where(place == best[..., None], -jnp.inf, scores)
    return scores.max(axis=-1) - others.max(axis=-1)


def choice_margin(
    scores: jax.Array, edges: Edges, noise: jax.Array, token: jax.Array
) -> jax.Array:
    """Returns how much scores would have to change for another token to be chosen.

    Another kept token could overtake the chosen one, a filter could drop the chosen
    one, or a filter could keep a dropped token with a larger score.

    Args:
      scores: [B, V] float32. Scores of the tokens, including the sampling noise. Only
        their differences matter.
      edges: the edges of the filters, computed from scores [B, 1, V] without noise.
      noise: [B, V] float32. The sampling noise.
      token: [B] int32. The argmax of the scores.

    Returns:
      [B] float32.
    """
    distance, others = edges.distance[:, 0], edges.unfiltered[:, 0] + noise
    kept = jnp.take_along_axis(distance, token[:, None], axis=1)[:, 0]
    lead = jnp.take_along_axis(others, token[:, None], axis=1) - others
    let_in = jnp.where(distance < 0, jnp.maximum(-distance, lead), jnp.inf)
    margin = jnp.minimum(top2_margin(scores, token), let_in.min(axis=-1))
    return jnp.minimum(margin, jnp.maximum(kept, 0.0))
