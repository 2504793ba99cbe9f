"""Drafts a tree with a draft model, level by level, with the same tree scan as the
target.

The draft model first reads the tokens that were added to the text since it last drafted
(a chain), and then drafts below them. It discards the states of its draft. Accepted
tokens are read again as text at the next step, so rejected branches never enter its
state.

Letters: B rows, T nodes, M depth of the tree, I maximum number of inner nodes per
level, C maximum number of children per node, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    ModelConfig,
    State,
    abstract_params,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
    without_mtp,
)
from stree_jax.models.stack.memory import weights_read
from stree_jax.sampling.best import best_scores
from stree_jax.sampling.distribution import DRAFT, Distribution
from stree_jax.sampling.threefry import fold_in, uniform
from stree_jax.speculation.accept import Drafting, Rule
from stree_jax.speculation.adaptive.model_levels import ModelLevels
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Reads,
    Update,
)
from stree_jax.speculation.drafters.beam import search
from stree_jax.speculation.drafters.progress import (
    Reading,
    add_update,
    begin_reading,
    read_all,
)
from stree_jax.speculation.layout import Levels, below_root, tree_layout, tree_levels
from stree_jax.speculation.source import Source, Vocabulary, check_state
from stree_jax.speculation.tree import Auto, Beam, Topology, Tree


class Fill(Protocol):
    """A function that fills a static tree or a beam with a model."""

    def __call__(
        self,
        model: Model,
        state: State,
        root: jax.Array,
        at_root: jax.Array,
        tree: Any,
        dist: Distribution,
        rule: Rule,
        /,
    ) -> Draft:
        """Returns the filled tree.

        Args:
          model: the draft model.
          state: the model's state after the root.
          root: [B] int32. Tokens of the roots.
          at_root: [B, 1, d] float32. The model's hidden states after the root.
          tree: the tree to fill.
          dist: the distribution of the tokens below the root.
          rule: the acceptance rule.
        """
        ...


@struct.dataclass
class ModelSource(Source):
    """A draft model."""

    value: Model
    name = "model"
    prefers_auto = True

    @classmethod
    def abstract(cls, config: ModelConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        config = replace(config, mtp=())
        return cls(Model(abstract_params(config, dtype), config))

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        model = self.value
        yield Vocabulary(name, model.config.num_tokens, model.tokenizer)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.value,)

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if past is not None:
            state = getattr(past, "state", past)
            check_state("past: of another drafter", self.value, state, batch)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        model = without_mtp(self.value)
        if isinstance(tree, Auto):
            return ModelLevels(model)
        return ModelDrafter(model, search if isinstance(tree, Beam) else fill_tree)


@struct.dataclass
class ModelDrafter(DrafterBase):
    """A draft model that fills static trees or beams.

    Attributes:
      model: the draft model.
      fill: `fill_tree`, or `beam.search` for beams.
    """

    model: Model
    fill: Fill = struct.field(pytree_node=False)
    cuts_back = True

    def init(self, prompts: Prompts, past: Reading | None) -> Reading:
        return begin_reading(self.model, prompts, past)

    def propose(
        self,
        state: Reading,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, Reading]:
        if tree.size == 1:
            return only_root(root), state
        hidden, state = read_all(self.model, state)
        draft = self.fill(self.model, state.state, root, hidden, tree, dist, rule)
        return draft, replace(state, passes=state.passes + tree.depth - 1)

    def commit(self, state: Reading, update: Update) -> Reading:
        return add_update(self.model, state, update)

    def reads(self, state: Reading, menu: Sequence[Topology]) -> list[Reads]:
        weights = weights_read(self.model)
        return [Reads("drafter", state.passes, weights, state=state.state)]


def fill_tree(
    model: Model,
    state: State,
    root: jax.Array,
    at_root: jax.Array,
    tree: Tree,
    dist: Distribution,
    rule: Rule,
    *,
    hands_down: bool = False,
) -> Draft:
    """Fills a static tree with a model; see `Fill` for the other arguments.

    Args:
      hands_down: True if each node reads its parent's hidden state in addition to its
        token, as in MTP layers.
    """
    batch, T, config = root.shape[0], tree.size, model.config
    levels, parents = tree_levels(tree), jnp.asarray(tree.parents, jnp.int32)
    nodes = below_root(tree.rows(batch), config.conv_taps)

    def draw(draft: Draft, hidden: jax.Array, depth: jax.Array) -> Draft:
        logits = logits_of(model, hidden)
        return draw_level(draft, logits, depth, tree, levels, dist, rule)

    def level(carry: tuple, depth: jax.Array) -> tuple[tuple, None]:
        draft, records, handed = carry
        above, previous = levels.inner[depth], None
        if hands_down:
            previous = handed[:, parents[above]]
        hidden, records, _ = forward_hidden(
            model,
            state,
            draft.tokens[:, above],
            nodes,
            records=records,
            rows=above,
            previous=previous,
        )
        if hands_down:
            handed = handed.at[:, above].set(hidden, mode="drop")
        return (draw(draft, hidden, depth), records, handed), None

    handed: Any = None
    if hands_down:  # [B, T, d], hidden states of the nodes that were read
        handed = jnp.zeros((batch, T, config.d_model), jnp.float32)
        handed = handed.at[:, :1].set(at_root)
    draft = draw(empty_draft(root, tree, dist, rule), at_root, jnp.int32(0))
    records = init_records(config, batch, T, param_dtype(model.params))
    depths = jnp.arange(1, tree.depth, dtype=jnp.int32)
    if not depths.size:  # without jit, `lax.scan` does not accept an empty array
        return draft
    (draft, _, _), _ = lax.scan(level, (draft, records, handed), depths)
    return draft


def empty_draft(root: jax.Array, tree: Tree, dist: Distribution, rule: Rule) -> Draft:
    """Returns a static tree below the roots [B] whose other tokens are not set yet."""
    batch, T = root.shape[0], tree.size
    with_q = dist.sampling is not None and rule.needs_q
    return Draft(
        layout=tree_layout(tree, tree.rows(batch)),
        tokens=jnp.broadcast_to(root[:, None], (batch, T)),
        q=jnp.zeros((batch, T, dist.num_tokens), jnp.float32) if with_q else None,
    )


def draw_level(
    draft: Draft,
    logits: jax.Array,
    depth: jax.Array,
    tree: Tree,
    levels: Levels,
    dist: Distribution,
    rule: Rule,
) -> Draft:
    """Sets the tokens of the children of the inner nodes at one depth.

    Args:
      draft: the tree, filled down to the depth.
      logits: [B, Q, >= V] float32. Logits after the first Q <= I inner nodes at the
        depth (Q = 1 for the root).
      depth: [] int32.
      tree: the tree.
      levels: its levels.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
    """
    above = levels.inner[depth, : logits.shape[1]]
    # All rows have the same static tree.
    paths = draft.layout.paths[0, jnp.minimum(above, tree.size - 1)]
    text, q = draft.tokens[:, paths], draft.q
    coupled = rule.drafting == "coupled"
    if dist.sampling is None or coupled or rule.drafting == "top_k":
        children = dist.best(logits, depth, tree.children, text, drawn=coupled)[1]
    else:
        depths = jnp.broadcast_to(depth, (1, above.shape[0]))
        z = dist.scores(logits, depths, text, normalised=rule.needs_q)
        children = draw_children(rule.drafting, dist, z, above, None, tree.children)
        if q is not None:
            q = q.at[:, above].set(jnp.exp(z), mode="drop")
    tokens, drawn = by_slot(children, above, tree, levels)
    return replace(draft, tokens=jnp.where(drawn, tokens, draft.tokens), q=q)


def by_slot(
    children: jax.Array, nodes: jax.Array, tree: Tree, levels: Levels
) -> tuple[jax.Array, jax.Array]:
    """Arranges children by parent and rank into tokens by node.

    Args:
      children: [B, Q, C] int32. Tokens of the children of Q nodes, by rank.
      nodes: [Q] int32. The parents; T for padding.
      tree: the tree.
      levels: its levels.

    Returns:
      Tokens [B, T] int32, and [T] bool, True for nodes whose parents are in `nodes`;
      other tokens are unspecified.
    """
    parents = jnp.asarray(tree.parents, jnp.int32)  # -1 for the root, never in `nodes`
    is_parent = parents[:, None] == nodes[None]  # [T, Q]
    place = jnp.argmax(is_parent, axis=1)
    tokens = children[:, place, levels.rank].astype(jnp.int32)
    return tokens, is_parent.any(axis=1)


def draw_children(
    drafting: Drafting,
    dist: Distribution,
    z: jax.Array,
    above: jax.Array,
    noise: jax.Array | None,
    count: int,
) -> jax.Array:
    """Returns tokens [B, I, count] of the children of I nodes, in the order in which
    they are drawn.

    Args:
      drafting: "top_k" (the most probable tokens), "iid" (independent draws),
        "without_replacement" (draws by the largest Gumbel-perturbed log-probabilities),
        or "coupled" (the same, with the noise with which the target will choose).
      dist: the distribution of the tokens below the root.
      z: [B, I, V] float32. Scores, of which only differences matter.
      above: [I] int32. The nodes.
      noise: [B, I or 1, V] float32. The target's noise after each node, for "coupled".
      count: number of children per node.
    """
    if dist.sampling is None or drafting == "top_k":
        return best_scores(z, count=count)[1]
    if drafting == "coupled":
        assert noise is not None  # passed by all callers with "coupled"
        return best_scores(z + noise, count=count)[1]
    by_node = jax.vmap(fold_in, in_axes=(None, 0))
    step = dist.keys(DRAFT, jnp.int32(0))
    keys = jax.vmap(by_node, in_axes=(0, None))(step, above)  # [B, I]
    if drafting == "iid":
        drawn = iid_draws(jnp.exp(z), keys, count)
        greedy = dist.sampling.greedy[:, None, None]
        return jnp.where(greedy, lax.top_k(z, count)[1], drawn)
    return lax.top_k(z + dist.gumbel(keys), count)[1]


def iid_draws(p: jax.Array, keys: jax.Array, count: int) -> jax.Array:
    """Returns independent draws [B, I, count] int32 from p [B, I, V], by inverting the
    cumulative sums."""

    def one(p: jax.Array, key: jax.Array) -> jax.Array:
        below = jnp.cumsum(p)
        u = uniform(key, count) * below[-1]
        u = jnp.minimum(u, jnp.nextafter(below[-1], 0.0))  # at most the last token
        return jnp.searchsorted(below, u, side="right").astype(jnp.int32)

    return jax.vmap(jax.vmap(one))(p, keys)
