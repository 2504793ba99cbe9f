"""Filling a static tree some levels at a time: the protocol of stages (Spector and Re
2023, section 3.2).

A stage is a drafter that another one can ask for guesses: below a tree's known levels
it fills in some more, as it would have drafted them. Who asked keeps what it would
itself have put there, and asks again below that.

Letters: B rows, T nodes, M depth of the tree, Q nodes that children are drawn for, C
most children of a node, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.nodes import tree_nodes
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import Drafter, DraftState, Reads
from stree_jax.speculation.drafters.model import draw_children, empty_draft
from stree_jax.speculation.layout import Levels, tree_levels
from stree_jax.speculation.tree import Topology, Tree

Opened = Any  # a stage's own pytree while a tree is filled


@struct.dataclass
class Task:
    """What is to be filled, and how tokens are chosen; the same for all stages.

    Attributes:
      tree: its shape.
      levels: derived from it.
      depth: [T] int32.
      lineage: [T, T] bool, whether s is t or above it, of [t, s].
      inner: [T] bool, whether a node has children.
      dist: what the tokens below the root are chosen by.
      noise: [B, M, V] float32, what the target chooses by after nodes at each depth;
        None where drafts are not coupled with it.
      rule: says how drafts are drawn.
      outermost: whether who fills is the drafter itself.
    """

    tree: Tree
    levels: Levels
    depth: jax.Array
    lineage: jax.Array
    inner: jax.Array
    dist: Distribution
    noise: jax.Array | None
    rule: Rule = struct.field(pytree_node=False)
    outermost: bool = struct.field(pytree_node=False, default=True)

    @property
    def parents(self) -> jax.Array:
        """[T] int32; of the root, itself."""
        return jnp.maximum(jnp.asarray(self.tree.parents, jnp.int32), 0)

    def empty(self, root: jax.Array) -> Draft:
        """Returns the tree below the roots [B], yet to be filled."""
        draft = empty_draft(root, self.tree, self.dist, self.rule)
        return replace(draft, origin=jnp.zeros(draft.tokens.shape, jnp.uint8))

    def draw(
        self, draft: Draft, logits: jax.Array, nodes: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns children as a model draws them.

        Args:
          logits: [B, Q, >= V] float32, after the nodes [Q] int32 (T: none).
          own: [B, Q] int32, the nodes' tokens; those above are the draft's.

        Returns:
          tokens [B, Q, C] int32, and log-probabilities [B, Q, V] of the nodes' own.
        """
        node = jnp.minimum(nodes, self.tree.size - 1)
        depth = self.depth[node]
        above = draft.layout.paths[0, node]  # rows are alike
        path = jnp.where(
            above[None] == node[None, :, None], own[..., None], draft.tokens[:, above]
        )
        z = self.dist.scores(logits, depth[None], path)
        noise = None if self.noise is None else self.noise[:, depth]
        asked = self.rule.drafting, self.dist, z, nodes, noise, self.tree.children
        return draw_children(*asked), z


def make_task(tree: Topology, dist: Distribution, rule: Rule) -> Task:
    """Returns the task of filling a static tree."""
    assert isinstance(tree, Tree)  # `Source.check_tree` sees to it
    levels, nodes = tree_levels(tree), tree_nodes(tree.rows(1), 1)
    inner = jnp.zeros((tree.size,), bool).at[levels.inner].set(True, mode="drop")
    noise = None
    if dist.sampling is not None and rule.drafting == "coupled":
        depths = jnp.arange(tree.depth, dtype=jnp.int32)
        noise = jax.vmap(dist.noise, out_axes=1)(depths)
    return Task(tree, levels, nodes.depth[0], nodes.mask[0], inner, dist, noise, rule)


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
        """Fill `ahead` levels, from the first with an inner node that is not known.

        Args:
          draft: who asks may have changed the tokens that it knows; the others are as
            this stage left them.
          known: [B, T] bool, tokens that are to stay; all, in rows that do not count.
        """
        ...

    def end(self, opened: Opened) -> DraftState:
        """Returns the state after the tree, which keeps nothing of it."""
        ...

    def reads(self, state: DraftState, menu: Sequence[Topology]) -> list[Reads]:
        """Returns what drafting has read, see `DrafterBase.reads`."""
        ...


class Several(Stage, Protocol):
    """One that can say what a node may be beside its likeliest guess."""

    def others(
        self, opened: Opened, draft: Draft, nodes: jax.Array, task: Task, count: int
    ) -> jax.Array:
        """Returns the likeliest other tokens [B, Q, count] int32 of nodes [Q] (T:
        none)."""
        ...


def first_unknown(task: Task, known: jax.Array) -> jax.Array:
    """Returns depth [] int32 of the first inner node that is not known [B, T]; M if all
    are."""
    open_ = (~known & task.inner[None]).any(axis=0)
    return jnp.where(open_, task.depth, task.tree.depth).min()
