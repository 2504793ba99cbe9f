"""The drafter of tree "auto": one pool of candidates from prompt lookup and another
drafter, the searcher.

Candidates are collected before the size of the tree is chosen. `AdaptivePolicy.choose`
first calls `look`, which finds continuations by prompt lookup. If that is expected to
be faster, it also calls `add_levels`, in which the searcher (such as a draft model)
adds candidates level by level. It then chooses the size of the tree, and `propose`
returns the best candidates for it.

Letters: B rows, W nodes of a level, M maximum number of levels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.common.words import LOOKUP
from stree_jax.models import Model, Taps
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import Worth, best_first
from stree_jax.speculation.adaptive.pool import (
    Pool,
    first_nodes,
    merged,
    no_tree,
)
from stree_jax.speculation.adaptive.search import Query, Searcher
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Reads,
    Update,
)
from stree_jax.speculation.drafters.lookup import (
    History,
    add_to_history,
    begin_history,
    look_up,
)
from stree_jax.speculation.tree import Budget, Topology


@struct.dataclass
class Looking:
    """The state of an `AdaptiveDrafter`.

    Attributes:
      history: the text so far and earlier texts, in which prompt lookup searches.
      searching: the searcher's state. None if only prompt lookup drafts.
      passes: [B] int32. Number of the searcher's forward passes since prefill.
      guessing: [B] int32. Number of these passes that also read guesses of n-grams.
      draft: the best candidates as the largest tree. The next tree is its first nodes.
    """

    history: History
    searching: DraftState
    passes: jax.Array
    guessing: jax.Array
    draft: Draft

    def kept(self) -> DraftState:
        """Returns the part of the state that a continuation needs: only the searcher's
        state, because the call passes the text again."""
        return self.searching


@struct.dataclass
class AdaptiveDrafter(DrafterBase):
    """Prompt lookup, optionally combined with another drafter.

    Attributes:
      searcher: the other drafter, or None.
      width, depth: W and M, the sizes of the searcher's levels.
      largest: the largest tree. Continuations from prompt lookup are as long as it is
        deep.
    """

    searcher: Searcher | None
    width: int = struct.field(pytree_node=False, default=3)
    depth: int = struct.field(pytree_node=False, default=8)
    largest: Budget = struct.field(pytree_node=False, default=Budget(16, 15))

    looks_up = True

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def taps(self) -> Taps:  # type: ignore[override]
        return () if self.searcher is None else self.searcher.taps

    @property
    def observes_prompts(self) -> bool:
        return self.searcher is not None and self.searcher.observes_prompts

    @property
    def models(self) -> tuple[Model, ...]:
        return () if self.searcher is None else self.searcher.models

    @property
    def of_target(self) -> Any:
        return () if self.searcher is None else self.searcher.of_target

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def copies_caches(self) -> bool:  # type: ignore[override]
        return self.searcher is not None and self.searcher.copies_caches

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def cuts_back(self) -> bool:  # type: ignore[override]
        return self.searcher is None or self.searcher.cuts_back

    def logit_rows(self, tree: Topology) -> int:
        return 0 if self.searcher is None else self.searcher.logit_rows(tree)

    def reads(self, state: Looking, menu: Sequence[Topology]) -> list[Reads]:
        if self.searcher is None:
            return []
        counted = state.searching, state.passes, state.guessing
        return self.searcher.search_reads(*counted, (self.width, self.depth))

    def key(self) -> str:
        return LOOKUP if self.searcher is None else self.searcher.key()

    def init(self, prompts: Prompts, past: DraftState | None) -> Looking:
        searching = None
        if self.searcher is not None:
            searching = self.searcher.init(prompts, past)
        return Looking(
            history=begin_history(prompts),
            searching=searching,
            passes=jnp.zeros_like(prompts.lengths),
            guessing=jnp.zeros_like(prompts.lengths),
            draft=no_tree(prompts.lengths.shape[0], self.largest),
        )

    def tokens_behind(self, state: Looking) -> jax.Array:
        """Returns the numbers of tokens [B] int32 that the searcher must read before it
        can draft."""
        length = state.history.own().length
        if self.searcher is None:
            return jnp.zeros_like(length)
        return self.searcher.unread(state.searching, length)

    def look(self, state: Looking, probability: jax.Array) -> Pool:
        """Returns a pool with candidates from prompt lookup, and space for the
        searcher's candidates at its end.

        Args:
          state: the drafter's state.
          probability: [Z] float32. Acceptance probability of nodes by kind.
        """
        extra = 0 if self.searcher is None else self.width * self.depth
        return look_up(state.history, probability, self.largest.depth, extra)

    def add_levels(
        self,
        state: Looking,
        pool: Pool,
        root: jax.Array,
        dist: Distribution,
        rule: Rule,
        probability: jax.Array,
        worth: Worth,
        least: jax.Array,
    ) -> tuple[Looking, Pool, jax.Array, jax.Array]:
        """Adds the searcher's candidates to the pool, in the space that `look` left.

        Args:
          state: the drafter's state.
          pool: the result of `look`.
          root: [B] int32. Tokens of the roots.
          dist: the distribution of the tokens below the root.
          rule: the acceptance rule.
          probability: [Z] float32. Acceptance probability of nodes by kind.
          worth: decides whether another level is worth its time.
          least: [] float32. Nodes of at most this value get no children, except the
            best node of each level.

        Returns:
          The state; the pool; the number of forward passes [] int32, including the one
          that read the root; and the values [B, M, W] float32 of all nodes, by level.
        """
        assert self.searcher is not None
        size, spare = (self.width, self.depth), self.largest.depth + 1
        query = Query(state.history.own(), dist, rule, *size, spare, worth)
        searching, search = self.searcher.search(state.searching, query)
        args = search.at_root, search.guesser, root, dist, rule, probability
        grown = best_first(*args, search.start, search.go_on, least)
        own, more = grown.pool, jnp.int32(0)
        if search.passes_by_level:
            # `grown.passes` includes the pass over the root, and so does
            # `search.passes`, to which `more` is added.
            more = grown.passes - 1
        values = own.value.reshape(-1, self.depth, self.width)
        guessing = state.guessing
        if self.searcher.without_guesses() is not self.searcher:
            guessing = guessing + more
        passes = state.passes + search.passes + more
        state = replace(state, searching=searching, passes=passes, guessing=guessing)
        return state, merged(pool, own), grown.passes, values

    def propose(
        self,
        state: Looking,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, Looking]:
        if tree.size == 1:
            return only_root(root), state
        # Clear the draft. Unchanged, it would be invariant in the loop over steps of
        # one size. XLA would then move work on it, such as the first layer's product,
        # out of the loops of all sizes, and every step would do it for all sizes.
        draft = state.draft
        parents = jnp.zeros_like(draft.layout.parents)
        layout = replace(draft.layout, parents=parents)
        used_up = replace(draft, tokens=jnp.zeros_like(draft.tokens), layout=layout)
        assert isinstance(tree, Budget)  # as all trees of an `AdaptivePolicy`
        return first_nodes(draft, tree), replace(state, draft=used_up)

    def commit(self, state: Looking, update: Update) -> Looking:
        state = replace(state, history=add_to_history(state.history, update))
        if self.searcher is None:
            return state
        searching = self.searcher.commit(state.searching, update)
        passes = state.passes + self.searcher.passes_by_update
        return replace(state, searching=searching, passes=passes)

    def read_for_cache(self, state: Looking) -> Looking:
        if self.searcher is None:
            return state
        return replace(state, searching=self.searcher.read_for_cache(state.searching))

    def observe(self, state: Looking, update: Update) -> Looking:
        assert self.searcher is not None  # checked by `observes_prompts`
        searching = self.searcher.observe(state.searching, update)
        return replace(state, searching=searching)  # the history has the prompts
