"""Drafts with Medusa heads on the target's hidden states (Cai et al. 2024, section
2.1).

The heads read the hidden state that chose the root of the next tree. Head k predicts
the tokens of level k of a static tree, the same tokens below every node of the level
above. This needs no draft model and no cache, and one matrix product per head.

Letters: B rows, T nodes, M depth of the tree, I maximum number of inner nodes per
level, C maximum number of children per node, V tokens of the vocabulary, d width of the
target's hidden states.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.common.checks import decimal, shown
from stree_jax.models import Model, without_mtp
from stree_jax.models.base.keys import key_of
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.drafters.heads import (
    Heads,
    HeadsConfig,
    first_heads,
    head_logits,
    head_of,
    init_heads,
)
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import by_depth, nothing_grown
from stree_jax.speculation.adaptive.search import Query, Search, Searcher, any_level
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Reads,
    Update,
)
from stree_jax.speculation.drafters.model import (
    by_slot,
    draw_level,
    empty_draft,
)
from stree_jax.speculation.gain import Acceptance, greedy_tree
from stree_jax.speculation.layout import tree_levels
from stree_jax.speculation.source import Source, Work
from stree_jax.speculation.tree import MAX_NODES, Auto, Topology, Tree

SPARSE_NODES = 16  # number of nodes of the default tree
ASSUMED_RANKS = 10  # ranks of the assumed accuracies


@struct.dataclass
class HeadsSource(Source):
    """Medusa heads of the target."""

    value: Heads
    name = "heads"
    prefers_auto = True
    by_level = False

    @classmethod
    def abstract(cls, config: HeadsConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        make = partial(init_heads, config, dtype=dtype)
        return cls(Heads(jax.eval_shape(make, key_of(0)), config))

    @property
    def count(self) -> int:
        return self.value.config.heads

    def narrowed(self, count: int) -> Self:
        return replace(self, value=first_heads(self.value, count))

    def narrower(self) -> Iterator[Source]:
        for count in range(self.count, 0, -1):
            yield self.narrowed(count)

    def check(self, target: Model) -> None:
        own, c = self.value.config, target.config
        if own.d_model != c.d_model:
            raise ValueError(
                f"heads: of states {own.d_model} wide, but the target's are "
                f"{c.d_model} wide; use the model that they were trained on"
            )
        if own.own_output and own.vocab_size < c.num_tokens:
            raise ValueError(
                f"heads: {own.vocab_size} tokens, but the target has {c.num_tokens}; "
                "use the model that they were trained on"
            )

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Auto):
            return
        if not isinstance(tree, Tree):
            raise ValueError(
                f"tree: heads fill a fixed tree, such as 'chain:{self.count}', or "
                "'auto'; beams need a draft model"
            )
        if tree.depth > self.count:
            raise ValueError(
                f"tree: {tree.depth} levels want as many heads, and there are "
                f"{self.count}"
            )

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if isinstance(past, LastHidden):
            if past.hidden.shape != (batch, self.value.config.d_model):
                raise ValueError("past: its heads belong to another target")

    def fixed_tree(self) -> Tree:
        return sparse_tree(self.value, usual_nodes(self.value))

    def sparse_tree(self, nodes: str) -> Tree:
        return sparse_tree(self.value, nodes)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return MedusaDrafter(self.value, head_of(without_mtp(target)))

    @property
    def search_size(self) -> tuple[int, int]:
        # More nodes per level than other sources have, because levels of heads take no
        # further passes.
        return 5, self.count

    def acceptance(self) -> Acceptance:
        return Acceptance(np.array(accuracy_of(self.value)))

    def work(self, target: Model) -> Work:
        read = heads_read(self.value, self.count)
        if not self.value.config.own_output:
            read += size_of(target.params["embedding"])
        return Work(read_once=read)


def sparse_tree(heads: Heads, nodes: int | str) -> Tree:
    """Returns the tree of `nodes` nodes with the largest expected acceptance length for
    the heads' accuracies, computed by `gain.greedy_tree`.

    Args:
      heads: the Medusa heads.
      nodes: number of nodes including the root, an int or its digits.
    """
    size = decimal(str(nodes)) or 0
    if not 1 < size <= MAX_NODES:
        raise ValueError(
            f"tree: sparse:N wants N in 2..{MAX_NODES}, got {shown(nodes)}"
        )
    return greedy_tree(Acceptance(np.array(accuracy_of(heads))), size)


def usual_nodes(heads: Heads) -> int:
    """Returns the number of nodes of the default tree: `SPARSE_NODES`, or the maximum
    for few heads or ranks."""
    levels, ranks = np.shape(accuracy_of(heads))
    return min(SPARSE_NODES, sum(ranks**depth for depth in range(levels + 1)))


def accuracy_of(heads: Heads) -> tuple[tuple[float, ...], ...]:
    """Returns the accuracies [K][R] of `HeadsConfig.accuracy`, or assumed ones if they
    were not measured."""
    if heads.config.accuracy:
        return heads.config.accuracy
    ranks = range(ASSUMED_RANKS)
    best = (0.6 * 0.8**k for k in range(heads.config.heads))
    return tuple(tuple(0.6 * p * 0.4**r for r in ranks) for p in best)


def heads_read(heads: Heads, count: int) -> int:
    """Returns the bytes of the first `count` heads, without the model's output head."""
    first = [heads.params[f"head_{k}"] for k in range(count)]
    return size_of(first)


@register_for_export
@struct.dataclass
class LastHidden:
    """The state of a `MedusaDrafter`.

    Attributes:
      hidden: [B, d] float32. The target's hidden state that chose the root of the next
        tree.
      passes: [B] int32. Passes of the heads since the prompts were read.
    """

    hidden: jax.Array
    passes: jax.Array


@struct.dataclass
class MedusaDrafter(Searcher):
    """A drafter with Medusa heads of the target.

    Attributes:
      heads: the heads, at least as many as the depth of the trees.
      output: the target's output head, see `models.drafters.heads.head_of`.
    """

    heads: Heads
    output: Model
    observes_prompts = True
    cuts_back = True

    def init(self, prompts: Prompts, past: DraftState | None) -> LastHidden:
        """Returns the cached hidden state or, without one, zeros until the prompts are
        observed."""
        batch, d = prompts.lengths.shape[0], self.heads.config.d_model
        hidden = jnp.zeros((batch, d), jnp.float32)
        if isinstance(past, LastHidden):
            hidden = past.hidden
        return LastHidden(hidden, jnp.zeros((batch,), jnp.int32))

    def commit(self, state: LastHidden, update: Update) -> LastHidden:
        return replace(state, hidden=update.last_of(update.hidden, state.hidden))

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
        assert isinstance(tree, Tree)  # checked by `HeadsSource.check_tree`
        logits = self.logits(state, tree.depth)
        draft = fill_by_depth(root, logits, tree, dist, rule)
        return draft, replace(state, passes=state.passes + 1)

    def logits(self, state: LastHidden, depth: int) -> jax.Array:
        """Returns the logits [B, depth, >= V] float32 of the tokens at depths 1 ..
        `depth` below the next root."""
        return head_logits(self.heads, self.output, state.hidden, depth)

    def search(self, state: LastHidden, query: Query) -> tuple[LastHidden, Search]:
        logits = self.logits(state, query.depth)
        guesser = by_depth(logits, drawn_alike(query.dist, query.rule))
        start = nothing_grown(None, logits.shape[0], query.width, query.depth)
        step = any_level(query), jnp.int32(1), False
        return state, Search(logits[:, :1], guesser, start, *step)

    @property
    def models(self) -> tuple[Model, ...]:
        return ()  # `output` is a model, but does not run forward passes

    @property
    def of_target(self) -> Any:
        return self.output

    def logit_rows(self, tree: Topology) -> int:
        return min(tree.depth, self.heads.config.heads)

    def _reads(self, passes: Any, depth: int) -> list[Reads]:
        """Returns the memory traffic of passes over the heads of `depth` levels."""
        each = heads_read(self.heads, min(depth, self.heads.config.heads))
        if not self.heads.config.own_output:
            each += weights_read(self.output)
        return [Reads("heads", passes, each)]

    def reads(self, state: LastHidden, menu: Sequence[Topology]) -> list[Reads]:
        return self._reads(state.passes, max(tree.depth for tree in menu))

    def search_reads(
        self, state: LastHidden, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        return self._reads(passes, size[1])

    def key(self) -> str:
        config = replace(self.heads.config, accuracy=())
        return f"{config} {self.heads.weight_format}"


def fill_by_depth(
    root: jax.Array, logits: jax.Array, tree: Tree, dist: Distribution, rule: Rule
) -> Draft:
    """Fills a static tree with tokens whose logits depend only on the depth.

    Args:
      root: [B] int32. Tokens of the roots.
      logits: [B, M, >= V] float32. Logits of the tokens at depths 1 .. M.
      tree: the tree.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
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
    """True if all nodes of a level have the same children, given the same logits: the
    probabilities do not depend on the path, and there are no separate draws per
    node."""
    if dist.counts is not None or dist.state is not None:
        return False
    return dist.sampling is None or rule.drafting in ("top_k", "coupled")
