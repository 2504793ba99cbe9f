"""Counts how often drafts agree with the target on a given text.

At every place of the text the drafter drafts a tree below the text so far, and the
target's most probable token says which drafts are right. No text is generated: both
read the same tokens, so that the figures of two drafters, or of two ways to read the
same drafter, can be compared place by place.

A text that the target sampled is compared with itself: its tokens are what the target
chose, and drafts are made as during sampling, with the target's noise.

Letters: n places, T nodes, M depth of the trees, S tokens of a piece of text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.models import (
    Model,
    chain_nodes,
    forward_tapped,
    init_state,
    logits_of,
    param_dtype,
    without_mtp,
)
from stree_jax.models.base.argmax import argmax
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, SamplingRows, sampling_rows
from stree_jax.speculation.accept import NAIVE, Rule
from stree_jax.speculation.adaptive.best_first import best_first
from stree_jax.speculation.adaptive.calibration import PRIOR
from stree_jax.speculation.adaptive.pool import best_tree
from stree_jax.speculation.adaptive.search import Query, Searcher
from stree_jax.speculation.drafter import Drafter, DraftState, Prompts, Update
from stree_jax.speculation.drafters.lookup import History
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Budget, Topology, Tree, make_tree, resolve_tree

COUPLED = Rule("naive", "coupled")
PIECE = 512  # tokens of text that are read at once; a longer text is cut


@dataclass(frozen=True)
class Agreement:
    """Draft trees at n places of a text.

    Attributes:
      tokens: [n, T] int32, the drafted trees; node 0 is a token of the text.
      parents: [n, T] int32, -1 for the root and less for padding.
      depth: [n, T] int32.
      text: [n, M] int32, the tokens after each place; -1 after the end.
      target: [n, M] int32, the target's most probable tokens at these places; for a
        sampled text, the text's tokens.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    text: np.ndarray
    target: np.ndarray

    @property
    def levels(self) -> int:
        """M."""
        return self.text.shape[1]

    def after(self, place: int) -> "Agreement":
        """Returns the drafts from a place of the text on."""
        return Agreement(*(getattr(self, f.name)[place:] for f in fields(self)))

    def accepted(self) -> np.ndarray:
        """Returns which nodes [n, T] would be accepted if the target wrote the text:
        the node and its ancestors are the text's tokens."""
        rows = np.arange(len(self.tokens))
        right = np.zeros(self.tokens.shape, bool)
        right[:, 0] = True
        for t in range(1, self.tokens.shape[1]):
            above = np.maximum(self.parents[:, t], 0)
            level = np.maximum(self.depth[:, t] - 1, 0)
            same = self.tokens[:, t] == self.text[rows, level]
            right[:, t] = same & right[rows, above] & (self.parents[:, t] >= 0)
        return right

    def tau(self) -> float:
        """Returns the mean number of tokens per pass on this text: the accepted nodes
        of the longest path, and one more."""
        deepest = np.where(self.accepted(), self.depth, 0).max(axis=1)
        return float(1 + deepest.mean())

    def by_position(self) -> list[tuple[float, int]]:
        """Returns, for each level, how often the first draft is the target's token, and
        at how many places: those where all drafts before it are the text's tokens."""
        rows, found = np.arange(len(self.tokens)), []
        at = np.zeros(len(rows), np.int64)
        reached = np.ones(len(rows), bool)
        for level in range(self.levels):
            child = (self.parents == at[:, None]) & (self.depth == level + 1)
            reached &= child.any(axis=1) & (self.text[:, level] >= 0)
            at = np.where(reached, child.argmax(axis=1), at)
            token = self.tokens[rows, at]
            count = int(reached.sum())
            right = (token == self.target[:, level]) & reached
            found.append((float(right.sum() / max(count, 1)), count))
            reached &= token == self.text[:, level]
        return found

    def after_siblings(self) -> list[tuple[float, int]]:
        """Returns, for each level but the last, how often some child of a right node
        that is not its parent's first child is right, and at how many places there is
        such a node with children."""
        right, found = self.accepted(), []
        first = self._first_children()
        for level in range(1, self.levels):
            side = right & (self.depth == level) & ~first
            chosen = side.argmax(axis=1)[:, None]
            children = (self.parents == chosen) & side.any(axis=1)[:, None]
            asked = children.any(axis=1) & (self.text[:, level] >= 0)
            hit = (children & right).any(axis=1) & asked
            count = int(asked.sum())
            found.append((float(hit.sum() / max(count, 1)), count))
        return found

    def _first_children(self) -> np.ndarray:
        """Returns which nodes [n, T] are the first child of their parent."""
        first = np.zeros(self.tokens.shape, bool)
        for row, parents in enumerate(self.parents):
            _, place = np.unique(parents, return_index=True)
            first[row, place] = True
        return first


def agreement(
    target: Model,
    drafter: AnyDrafter | Source,
    token_ids: Sequence[int] | np.ndarray,
    tree: Topology | str | Sequence[int],
    *,
    sampling: Sampling | None = None,
    prompt: int = 1,
) -> Agreement:
    """Drafts a tree at every place of a text.

    Args:
      target: the target model.
      drafter: as in `generate`.
      token_ids: the text, at least 2 tokens. It is read in pieces of `PIECE` tokens,
        without the text before them.
      tree: a static tree or its name; or a `Budget`, for the best tree of so many nodes
        that the drafter finds without prompt lookup.
      sampling: the settings with which the target sampled the text, with their seed;
        None for other texts.
      prompt: with `sampling`, the number of tokens before the sampled ones. The drafts
        before place `prompt - 1` are then of no use, see `Agreement.after`.

    Raises:
      ValueError: the drafter does not fit the target, or does not draft such trees; or
        `sampling` has a repetition penalty or no seed.
    """
    ids = np.asarray(token_ids, np.int32)
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(f"text: want at least 2 tokens, got {ids.shape}")
    rows = None if sampling is None else _rows_of(sampling)
    source = source_of(drafter, target.config)
    source.check(target)
    searched = isinstance(tree, Budget)
    shape = tree if isinstance(tree, Budget) else resolve_tree(tree)
    if not searched:
        source.check_tree(shape)
    bound = source.bind(target, resolve_tree("auto") if searched else shape)
    if searched and not isinstance(bound, Searcher):
        raise ValueError("tree: this drafter does not search for trees")
    if not searched:
        shape = source.filled(shape)
    width = min(source.search_size[0], target.config.num_tokens)
    key = tuple(map(int, shape.parents)) if isinstance(shape, Tree) else shape
    run = partial(_drafted, tree=key, width=width if searched else 0)
    asked = without_mtp(target), bound, rows
    pieces = [
        Agreement(*_piece(run, asked, ids[i : i + PIECE], i - prompt, shape.depth))
        for i in range(0, len(ids) - 1, PIECE)
    ]
    return joined(pieces)


def _rows_of(sampling: Sampling) -> SamplingRows | None:
    """Returns the settings as arrays, or None if they are greedy."""
    if sampling.penalised or sampling.logit_bias:
        raise ValueError("sampling: want no penalty and no logit_bias")
    if sampling.seed is None:
        raise ValueError("sampling: want the seed that was used")
    return None if sampling.temperature == 0 else sampling_rows([sampling])


def _piece(
    run: Any,
    asked: tuple[Model, Drafter, SamplingRows | None],
    ids: np.ndarray,
    place: int,
    depth: int,
) -> Iterator[np.ndarray]:
    """Yields the fields of `Agreement` for one piece of text, whose first token has
    this place in the target's output."""
    padded = np.zeros(PIECE if len(ids) > 64 else 64, np.int32)
    padded[: len(ids)] = ids
    best, tokens, parents, levels = run(*asked, jnp.asarray(padded), jnp.int32(place))
    n = len(ids) - 1
    for table in (tokens, parents, levels):
        yield np.asarray(table)[:n]
    after = np.arange(n)[:, None] + np.arange(depth)[None]
    text = np.append(ids[1:], np.full(depth, -1, np.int32))
    yield text[after]
    chosen = np.append(np.asarray(best)[:n], np.full(depth, -1, np.int32))
    yield chosen[after] if asked[2] is None else text[after]


@partial(jax.jit, static_argnames=("tree", "width"))
def _drafted(
    target: Model,
    drafter: Any,
    sampling: SamplingRows | None,
    ids: jax.Array,
    place: jax.Array,
    *,
    tree: Topology | tuple[int, ...],
    width: int,
) -> tuple[jax.Array, ...]:
    """Returns the target's most probable token after each token of a text [S], and the
    tokens, parents and depths [S, T] of the tree drafted there.

    Args:
      target, drafter: the target, and a drafter that is bound to it.
      sampling: the settings of the text, or None.
      ids: [S] int32.
      place: [] int32. Place of the first token in the target's output.
      tree: the tree, or the parents of its nodes.
      width: nodes per level of a search for the best tree; 0 if the drafter fills the
        tree.
    """
    shape = make_tree(tree) if isinstance(tree, tuple) else tree
    S, taps, V = ids.shape[0], drafter.taps, target.config.num_tokens
    state = init_state(target.config, 1, S, param_dtype(target.params))
    nodes = chain_nodes(1, S, target.config.conv_taps)
    hidden, tapped, _, _ = forward_tapped(target, state, ids[None], nodes, taps=taps)
    best = argmax(logits_of(target, hidden)[0, :, :V])
    one = jnp.ones((1,), jnp.int32)
    start = drafter.init(Prompts(ids[None, :1], one, S + 64, 1), None)

    def step(drafting: DraftState, i: jax.Array) -> tuple[DraftState, tuple]:
        text = History(ids[None], one * (i + 1))
        dist = text_distribution(sampling, jnp.maximum(place + i + 1, 0)[None], V)
        draft, after = _draft(drafter, drafting, text, ids[i][None], dist, shape, width)
        row = partial(lax.dynamic_slice_in_dim, start_index=i, slice_size=1, axis=1)
        token = ids[jnp.minimum(i + 1, S - 1)][None, None]
        update = Update(token, one, row(hidden), tuple(map(row, tapped)))
        layout = draft.layout
        out = draft.tokens[0], layout.parents[0], layout.depth[0]
        return drafter.commit(after, update), out

    _, (tokens, parents, depth) = lax.scan(step, start, jnp.arange(S, dtype=jnp.int32))
    return best, tokens, parents, depth


def _draft(
    drafter: Any,
    state: DraftState,
    text: History,
    root: jax.Array,
    dist: Distribution,
    tree: Topology,
    width: int,
) -> tuple[Any, DraftState]:
    """Drafts one tree; see `_drafted`."""
    rule = NAIVE if dist.sampling is None else COUPLED
    if not width:
        return drafter.propose(state, root, tree, dist, rule)
    assert isinstance(tree, Budget)
    query = Query(text, dist, rule, width, tree.depth, 8, _always)
    state, search = drafter.search(state, query)
    asked = search.at_root, search.guesser, root, dist, rule, jnp.asarray(PRIOR)
    grown = best_first(*asked, search.start, search.go_on)
    return best_tree(grown.pool, root, tree)[0], state


def _always(levels: jax.Array, value: jax.Array, passes: float = 1.0) -> jax.Array:
    """Returns True: every level is worth its time, see `Worth`."""
    return jnp.bool_(True)


def text_distribution(
    sampling: SamplingRows | None, place: jax.Array, num_tokens: int
) -> Distribution:
    """Returns the distribution of the tokens at places [B] of the target's output,
    without limits; greedy if `sampling` is None."""
    none = jnp.zeros_like(place)
    stops = jnp.full((len(place), 1), -1, jnp.int32)
    requests = Requests(none, None, stops, None, sampling)
    return Distribution(requests, place, None, num_tokens)


def joined(parts: Sequence[Agreement]) -> Agreement:
    """Returns the drafts of several texts, with trees of one shape."""
    names = [f.name for f in fields(Agreement)]
    return Agreement(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))
