"""The protocol of drafters for tree "auto", which searches candidates level by level.

Letters: B rows, W nodes of a level, M maximum number of levels, C = W M candidates, V
tokens of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import (
    Grown,
    Guesser,
    Scored,
    Worth,
    nothing_grown,
    of_rows,
)
from stree_jax.speculation.drafter import DrafterBase, DraftState, Reads
from stree_jax.speculation.drafters.lookup import History


class Query(NamedTuple):
    """The arguments of a search.

    Attributes:
      text: the text of each row; its last token is the root.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
      width, depth: W and M.
      spare: number of tokens after the text for which caches have space.
      worth: decides whether another level is worth its time.
    """

    text: History
    dist: Distribution
    rule: Rule
    width: int
    depth: int
    spare: int
    worth: Worth


class Search(NamedTuple):
    """A search for candidates that has read the root, but has no level yet.
    `best_first` runs it.

    Attributes:
      at_root: [B, 1, >= V] float32. Logits after the root, or a `Scored` with its best
        children.
      guesser: function that computes logits, or a `Scored`, after the nodes of a level.
      start: result of `nothing_grown`, with the guesser's `records`.
      go_on: (grown) -> [] bool, whether another level is worth its time.
      passes: [] int32. Number of forward passes that it took to compute `at_root`.
      passes_by_level: True if every level after the first takes a forward pass.
    """

    at_root: jax.Array | Scored
    guesser: Guesser
    start: Grown
    go_on: Callable[[Grown], jax.Array]
    passes: jax.Array
    passes_by_level: bool = True


class Searcher(DrafterBase):
    """A drafter that tree "auto" can search.

    Attributes:
      passes_by_update: forward passes that `commit` takes.
    """

    passes_by_update: int = 0

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError unless a subclass fills static trees; tree "auto"
        only calls `search`."""
        raise NotImplementedError

    def search(self, state: DraftState, query: Query) -> tuple[DraftState, Search]:
        """Returns the state after the whole text, and a search below its last token."""
        raise NotImplementedError

    def unread(self, state: DraftState, length: jax.Array) -> jax.Array:
        """Returns the numbers of tokens [B] int32 that must be read before the next
        draft, for texts of `length` [B] tokens."""
        return jnp.zeros_like(length)

    def without_guesses(self) -> "Searcher":
        """Returns the drafter without n-grams that guess its levels; itself if it does
        not use any."""
        return self

    def expected_levels(self, levels: int) -> float:
        """Returns the expected number of levels per pass, for drafts of `levels`
        levels."""
        return 1.0

    def search_reads(
        self, state: DraftState, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        """Returns the memory traffic of searches, see `DrafterBase.reads`.

        Args:
          state: the drafter's state.
          passes: [B] int32. Passes of all searches and updates.
          guessing: [B] int32. Number of these passes that also read guesses of n-grams.
          size: W and M.
        """
        return []


def any_level(query: Query) -> Callable[[Grown], jax.Array]:
    """Returns the function `Search.go_on` for searches in which each level takes a
    forward pass."""

    def go_on(grown: Grown) -> jax.Array:
        return query.worth(grown.levels, grown.frontier.value)

    return go_on


After = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def recurrent_search(
    query: Query, at_root: jax.Array, memory: Any, after: After
) -> Search:
    """Returns the search of a recurrent drafter: the logits after a node depend on the
    node's token and a memory of its parent.

    Args:
      query: the arguments of the search.
      at_root: [B, 1, >= V] float32. Logits after the root.
      memory: a pytree of arrays [B, ...]. Memory of the root.
      after: (tokens [B, W] int32, memory of their parents [B, W, ...], depth [] int32)
        -> (logits [B, W, >= V] float32, memory of the nodes [B, W, ...]).
    """
    batch, count = at_root.shape[0], query.width * query.depth

    def table(x: jax.Array) -> jax.Array:
        empty = jnp.zeros((batch, 1 + count, *x.shape[1:]), x.dtype)
        return empty.at[:, 0].set(x)

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        rows = grown.frontier.rows
        above = grown.pool.parents[:, rows]
        of_parents = jax.tree.map(lambda x: of_rows(x, above), grown.records)
        tokens = grown.pool.tokens[:, rows]
        logits, own = after(tokens, of_parents, grown.levels)
        kept = jax.tree.map(lambda x, y: x.at[:, 1 + rows].set(y), grown.records, own)
        return logits, replace(grown, records=kept, passes=grown.passes + 1)

    start = nothing_grown(None, batch, query.width, query.depth)
    start = replace(start, records=jax.tree.map(table, memory))
    return Search(at_root, guess, start, any_level(query), jnp.int32(0))
