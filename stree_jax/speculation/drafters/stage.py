"""The protocol of stages, which guess the draft of another drafter (Spector and Re
2023, section 3.2).

A stage fills a few levels of a static tree below its known levels, as it would draft
them itself. The outer drafter (the caller) verifies these guesses, keeps those that are
equal to its own draft, and calls the stage again below them.

Letters: B rows, T nodes, M depth of the tree, Q nodes whose children are drawn, C
maximum number of children per node, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.layers.nodes import tree_nodes
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import Drafter, DraftState, Reads
from stree_jax.speculation.drafters.model import draw_children, empty_draft
from stree_jax.speculation.layout import Levels, tree_levels
from stree_jax.speculation.tree import Topology, Tree

Opened = Any  # a stage's state while a tree is filled: a pytree of its choice


@struct.dataclass
class Task:
    """The task of filling a static tree, with data shared by all stages.

    Attributes:
      tree: the tree.
      levels: its levels.
      depth: [T] int32. Depths of the nodes.
      lineage: [T, T] bool. [t, s] is True if s is t or an ancestor of t.
      inner: [T] bool. True for nodes with children.
      dist: the distribution of the tokens below the root.
      noise: [B, M, V] float32. The target's sampling noise after nodes at each depth.
        None if drafts are not coupled with it.
      rule: the acceptance rule, which says how draft tokens are drawn.
      outermost: True for the drafter of the target, False for a stage that guesses.
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
        """[T] int32. Parents of the nodes; the root is its own parent."""
        return jnp.maximum(jnp.asarray(self.tree.parents, jnp.int32), 0)

    def empty(self, root: jax.Array) -> Draft:
        """Returns the tree below the roots [B] whose other tokens are not set yet."""
        draft = empty_draft(root, self.tree, self.dist, self.rule)
        return replace(draft, origin=jnp.zeros(draft.tokens.shape, jnp.uint8))

    def draw(
        self, draft: Draft, logits: jax.Array, nodes: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Draws the children of nodes from a model's logits.

        Args:
          draft: the tree, which has the tokens above the nodes.
          logits: [B, Q, >= V] float32. Logits after the nodes.
          nodes: [Q] int32. T for padding.
          own: [B, Q] int32. Tokens of the nodes.

        Returns:
          Tokens [B, Q, C] int32, and the log-probabilities [B, Q, V] from which they
          were drawn.
        """
        node = jnp.minimum(nodes, self.tree.size - 1)
        depth = self.depth[node]
        above = draft.layout.paths[0, node]  # all rows have the same static tree
        path = jnp.where(
            above[None] == node[None, :, None], own[..., None], draft.tokens[:, above]
        )
        z = self.dist.scores(logits, depth[None], path)
        noise = None if self.noise is None else self.noise[:, depth]
        args = self.rule.drafting, self.dist, z, nodes, noise, self.tree.children
        return draw_children(*args), z


def make_task(tree: Topology, dist: Distribution, rule: Rule) -> Task:
    """Returns the task of filling a static tree."""
    assert isinstance(tree, Tree)  # checked by `Source.check_tree`
    levels, nodes = tree_levels(tree), tree_nodes(tree.rows(1), 1)
    inner = jnp.zeros((tree.size,), bool).at[levels.inner].set(True, mode="drop")
    noise = None
    if dist.sampling is not None and rule.drafting == "coupled":
        depths = jnp.arange(tree.depth, dtype=jnp.int32)
        noise = jax.vmap(dist.noise, out_axes=1)(depths)
    return Task(tree, levels, nodes.depth[0], nodes.mask[0], inner, dist, noise, rule)


class Stage(Drafter, Protocol):
    """A drafter that fills trees a few levels at a time; a pytree like all drafters."""

    def begin(
        self, state: DraftState, draft: Draft, task: Task, ahead: int
    ) -> tuple[Draft, Opened]:
        """Fills the levels 1 .. `ahead` of a draft that has only a root so far.

        Args:
          state: the stage's state after the text.
          draft: the tree.
          task: the task of filling the tree.
          ahead: number of levels.

        Returns:
          The draft, and the stage's state for further calls of `fill`.
        """
        ...

    def fill(
        self, opened: Opened, draft: Draft, known: jax.Array, task: Task, ahead: int
    ) -> tuple[Draft, Opened]:
        """Fills `ahead` levels, from the first level with an unknown inner node.

        Args:
          opened: the stage's state from `begin` or `fill`.
          draft: the tree. The caller may have changed known tokens; other tokens are as
            this stage left them.
          known: [B, T] bool. Tokens that must stay; all tokens of finished rows.
          task: the task of filling the tree.
          ahead: number of levels.
        """
        ...

    def end(self, opened: Opened) -> DraftState:
        """Returns the stage's state after the text, without the tree."""
        ...

    def reads(self, state: DraftState, menu: Sequence[Topology]) -> list[Reads]:
        """Returns the memory traffic of drafting, see `DrafterBase.reads`."""
        ...


class Several(Stage, Protocol):
    """A stage with several guesses per node."""

    def others(
        self, opened: Opened, draft: Draft, nodes: jax.Array, task: Task, count: int
    ) -> jax.Array:
        """Returns further guesses for nodes that already have one.

        Args:
          opened: the stage's state.
          draft: the tree, with the first guesses.
          nodes: [Q] int32. The nodes; T for padding.
          task: the task of filling the tree.
          count: number of further guesses per node.

        Returns:
          The likeliest tokens [B, Q, count] int32, without the token in `draft`.
        """
        ...


def first_unknown(task: Task, known: jax.Array) -> jax.Array:
    """Returns the depth [] int32 of the first inner node that is not `known` [B, T] in
    some row; M if all are known."""
    open_ = (~known & task.inner[None]).any(axis=0)
    return jnp.where(open_, task.depth, task.tree.depth).min()
