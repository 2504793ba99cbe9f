"""What tree "auto" asks of a drafter: logits after candidate nodes, level by level.

Letters: B rows, W nodes of a level, M most levels, C = W M candidates, V tokens of the
vocabulary.
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
    Worth,
    nothing_grown,
    of_rows,
)
from stree_jax.speculation.drafter import DrafterBase, DraftState, Reads
from stree_jax.speculation.drafters.lookup import History


class Query(NamedTuple):
    """What a search is for.

    Attributes:
      text: of each row; the root is its last token.
      dist, rule: as of `Drafter.propose`.
      width, depth: W and M.
      spare: tokens after the text that caches have space for.
      worth: whether another level is worth its time.
    """

    text: History
    dist: Distribution
    rule: Rule
    width: int
    depth: int
    spare: int
    worth: Worth


class Search(NamedTuple):
    """A search below the roots, before its first level; see `best_first`.

    Attributes:
      at_root: [B, 1, >= V] float32, logits after the root.
      guesser: gives the logits after the nodes of a level.
      start: of `nothing_grown`, with the guesser's own `records`.
      go_on: (grown) -> bool [], whether another level is worth it.
      passes: [] int32, passes that reached the root.
      passes_by_level: whether every further level takes a pass.
    """

    at_root: jax.Array
    guesser: Guesser
    start: Grown
    go_on: Callable[[Grown], jax.Array]
    passes: jax.Array
    passes_by_level: bool = True


class Searcher(DrafterBase):
    """A drafter that tree "auto" can search.

    Attributes:
      passes_by_update: passes that `commit` takes.
    """

    passes_by_update: int = 0

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Fills no tree, unless a subclass does; tree "auto" only searches."""
        raise NotImplementedError

    def search(self, state: DraftState, query: Query) -> tuple[DraftState, Search]:
        """Returns the state after all of the text, and a search below its end."""
        raise NotImplementedError

    def unread(self, state: DraftState, length: jax.Array) -> jax.Array:
        """Returns how many tokens [B] int32 of texts so long [B] must be read before
        the next draft."""
        return jnp.zeros_like(length)

    def without_guesses(self) -> "Searcher":
        """Returns the same drafter without another that guesses its levels; itself if
        there is no such other."""
        return self

    def expected_levels(self, levels: int) -> float:
        """Returns how many of so many levels a pass is expected to reach."""
        return 1.0

    def search_reads(
        self, state: DraftState, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        """Returns what searches have read, see `DrafterBase.reads`.

        Args:
          passes: [B] int32, of all searches and updates.
          guessing: [B] int32, those of them that read guesses, too.
          size: W and M.
        """
        return []


def any_level(query: Query) -> Callable[[Grown], jax.Array]:
    """Returns the `go_on` of a search whose levels take a pass each."""

    def go_on(grown: Grown) -> jax.Array:
        return query.worth(grown.levels, grown.frontier.value)

    return go_on


After = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def recurrent_search(
    query: Query, at_root: jax.Array, memory: Any, after: After
) -> Search:
    """Returns the search of a drafter that knows what follows a node from the node's
    token and from what it keeps of the node's parent.

    Args:
      at_root: [B, 1, >= V] float32, logits after the root.
      memory: a pytree of [B, ...], what is kept of the root.
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
