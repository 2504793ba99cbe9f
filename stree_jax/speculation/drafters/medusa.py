"""Drafting with Medusa heads on the target itself (Cai et al. 2024, section 2.1).

The state that chose the next tree's root says what follows it: head k fills the level k
of a static tree, the same guesses below every node of the level above. There is no
second model, no state of one, and all levels together take one product a head.

Letters: B rows, T nodes, M depth of the tree, I most inner nodes of a level, C most
children of a node, V tokens of the vocabulary, d width of the target's hidden states.
"""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Model
from stree_jax.models.heads import Heads, head_logits
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import DraftState, News, Prompts
from stree_jax.speculation.drafters.model import (
    by_slot,
    draw_level,
    empty_draft,
)
from stree_jax.speculation.layout import tree_levels
from stree_jax.speculation.tree import Topology, Tree


@struct.dataclass
class LastHidden:
    """The state [B, d] float32 that chose the root of the next tree.

    Attributes:
      passes: [B] int32, of the heads since the prompts were read.
    """

    hidden: jax.Array
    passes: jax.Array


@struct.dataclass
class MedusaDrafter:
    """Heads of a target.

    Attributes:
      heads: as many at least as trees are deep.
      output: the target's head, `models.heads.head_of`.
    """

    heads: Heads
    output: Model
    hears_prompts: ClassVar[bool] = True

    def init(self, prompts: Prompts, past: DraftState | None) -> LastHidden:
        """Nothing is known before the first token; then drafts are bad for a step."""
        batch, d = prompts.lengths.shape[0], self.heads.config.d_model
        hidden = jnp.zeros((batch, d), jnp.float32)
        if isinstance(past, LastHidden):
            hidden = past.hidden
        return LastHidden(hidden, jnp.zeros((batch,), jnp.int32))

    def commit(self, state: LastHidden, news: News) -> LastHidden:
        last = jnp.maximum(news.length - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(news.hidden, last, axis=1)[:, 0]
        told = (news.length > 0)[:, None]
        return replace(state, hidden=jnp.where(told, hidden, state.hidden))

    def propose(
        self,
        state: LastHidden,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, LastHidden]:
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Tree)  # `specs.make_spec` sees to it
        logits = self.logits(state, tree.depth)
        draft = fill_by_depth(root, logits, tree, dist, rule)
        return draft, replace(state, passes=state.passes + 1)

    def logits(self, state: LastHidden, depth: int) -> jax.Array:
        """[B, depth, >= V] float32, of the tokens after the next root."""
        return head_logits(self.heads, self.output, state.hidden, depth)


def fill_by_depth(
    root: jax.Array, logits: jax.Array, tree: Tree, dist: Distribution, rule: Rule
) -> Draft:
    """A static tree below the roots [B], of guesses that go by depth alone.

    Args:
      logits: [B, M, >= V] float32, of the tokens at depths 1 .. M.
    """
    levels = tree_levels(tree)

    def level(draft: Draft, depth: jax.Array) -> tuple[Draft, None]:
        z = lax.dynamic_index_in_dim(logits, depth, axis=1)  # [B, 1, V]
        if not drawn_alike(dist, rule):
            z = jnp.broadcast_to(z, (z.shape[0], tree.inner, z.shape[2]))
            return draw_level(draft, z, depth, tree, levels, dist, rule), None
        coupled = rule.drafting == "coupled"
        children = dist.best(z, depth, tree.children, drawn=coupled)[1]
        above, shape = levels.inner[depth], (z.shape[0], tree.inner, tree.children)
        children = jnp.broadcast_to(children, shape)
        tokens, written = by_slot(children, above, tree, levels)
        return replace(draft, tokens=jnp.where(written, tokens, draft.tokens)), None

    draft = empty_draft(root, tree, dist, rule)
    return lax.scan(level, draft, jnp.arange(tree.depth, dtype=jnp.int32))[0]


def drawn_alike(dist: Distribution, rule: Rule) -> bool:
    """Whether the children of all nodes of a level are the same tokens: neither do
    their probabilities depend on the path, nor has each node draws of its own."""
    if dist.seen is not None:
        return False
    return dist.sampling is None or rule.drafting in ("top_k", "coupled")
