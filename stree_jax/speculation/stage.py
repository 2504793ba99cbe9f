"""Filling a static tree some levels at a time: the protocol of stages (Spector and Re
2023, section 3.2).

A stage is a drafter that another one can ask for guesses: below a tree's known levels
it fills in some more, as it would have drafted them. Who asked keeps what it would
itself have put there, and asks again below that.

Letters: B rows, T nodes, M depth of the tree, I most inner nodes of a level, C most
children of a node, V tokens of the vocabulary.
"""

from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import Drafter, DraftState
from stree_jax.speculation.layout import Levels, tree_levels
from stree_jax.speculation.model_drafter import (
    draw_level,
    empty_draft,
    with_children,
)
from stree_jax.speculation.tree import Topology, Tree

Opened = Any  # a stage's own pytree while a tree is filled


@struct.dataclass
class Task:
    """What is to be filled, and how tokens are chosen; the same for all stages.

    Attributes:
      tree: its shape.
      levels: derived from it.
      dist: what the tokens below the root are chosen by.
      rule: says how drafts are drawn.
      outermost: whether who fills is the drafter itself.
    """

    tree: Tree
    levels: Levels
    dist: Distribution
    rule: Rule = struct.field(pytree_node=False)
    outermost: bool = struct.field(pytree_node=False, default=True)

    def empty(self, root: jax.Array) -> Draft:
        """The tree below the roots [B], yet to be filled."""
        draft = empty_draft(root, self.tree, self.dist, self.rule)
        return replace(draft, origin=jnp.zeros(draft.tokens.shape, jnp.uint8))

    def draw(self, draft: Draft, logits: jax.Array, depth: jax.Array) -> Draft:
        """See `draw_level`; origins stay."""
        asked = self.tree, self.levels, self.dist, self.rule
        return draw_level(draft, logits, depth, *asked)

    def with_children(
        self, draft: Draft, children: jax.Array, depth: jax.Array, origin: int
    ) -> Draft:
        """The draft with children [B, I, C] of the inner nodes at a depth [] int32.

        Where the tree ends above, it stays as it is.
        """
        known = jnp.minimum(depth, self.tree.depth - 1)
        tokens = with_children(draft.tokens, children, known, self.tree, self.levels)
        written = (draft.layout.depth == depth + 1) & (depth < self.tree.depth)
        assert draft.origin is not None  # of `empty`
        return replace(
            draft,
            tokens=jnp.where(written, tokens, draft.tokens),
            origin=jnp.where(written, jnp.uint8(origin), draft.origin),
        )


def make_task(tree: Topology, dist: Distribution, rule: Rule) -> Task:
    """The task of filling a static tree."""
    assert isinstance(tree, Tree)  # `loop.make_spec` sees to it
    return Task(tree, tree_levels(tree), dist, rule)


class Stage(Drafter, Protocol):
    """A drafter that fills trees some levels at a time; a pytree like all drafters."""

    def begin(
        self, state: DraftState, draft: Draft, task: Task, ahead: int
    ) -> tuple[Draft, Opened]:
        """Fill the levels 1 .. `ahead` of a draft of which only the root is known."""
        ...

    def fill(
        self, opened: Opened, draft: Draft, known: jax.Array, task: Task, ahead: int
    ) -> tuple[Draft, Opened]:
        """Fill `ahead` levels below the level `known` [] int32.

        Tokens down to there may be others than it had filled in, and are to stay.
        """
        ...

    def end(self, opened: Opened) -> DraftState:
        """The state after the tree, of which nothing is kept."""
        ...
