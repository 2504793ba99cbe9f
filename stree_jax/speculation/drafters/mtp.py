"""Drafts with the target's layers for multi-token prediction (MTP).

MTP layers read a token of the text together with the target's hidden state that chose
it, and predict the next token. A draft token is read together with the MTP layers'
hidden state that predicted it, so the same layers draft every level of a tree. The
layers read all text, including the prompts, and discard the states of drafts.

Letters: B rows, M depth of the tree, d width of the target's hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import (
    Model,
    State,
    extend,
    grow,
    init_state,
    logits_of,
    mtp_model,
    param_dtype,
)
from stree_jax.models.memory import weights_read
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import by_model, nothing_grown
from stree_jax.speculation.adaptive.search import Query, Search, Searcher, any_level
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Reads,
    Update,
    model_key,
)
from stree_jax.speculation.drafters.model import fill_tree
from stree_jax.speculation.source import Source, Work, check_state
from stree_jax.speculation.tree import Auto, Topology, Tree

MTP = "mtp"


@struct.dataclass
class MTPSource(Source):
    """The target's layers for multi-token prediction."""

    value = name = MTP
    needs_mtp = True
    prefers_auto = True

    def check(self, target: Model) -> None:
        if not target.config.mtp:
            raise ValueError(
                "drafter: 'mtp' needs a target loaded with its MTP layers: "
                "stree_jax.load(path, mtp=True); this one has no MTP layers"
            )

    def check_tree(self, tree: Topology) -> None:
        if not isinstance(tree, Tree | Auto):
            raise ValueError(
                "tree: 'mtp' fills a fixed tree, such as 'E' or 'chain:4', or 'auto'; "
                "beams need a draft model"
            )

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if isinstance(past, MTPState):
            layers = mtp_model(target)
            check_state("past: of other MTP layers", layers, past.state, batch)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return MTPDrafter(mtp_model(target))

    def work(self, target: Model) -> Work:
        return Work((mtp_model(target),))


@struct.dataclass
class MTPState:
    """The state of the MTP layers, after all tokens of the text except the first.

    If the text continues a finished one, the tokens of that one's last step are
    missing, because finished rows have no updates. This affects drafts only.

    Attributes:
      state: the layers' state, with their caches.
      hidden: [B, 1, d] float32. The layers' hidden states at the root of the next tree;
        0 before the first update.
      passes: [B] int32. Passes of the layers since the prompts were read.
    """

    state: State
    hidden: jax.Array
    passes: jax.Array


@struct.dataclass
class MTPDrafter(Searcher):
    """A drafter with MTP layers, which fills static trees or is searched by tree
    "auto".

    Attributes:
      model: the layers as a model, see `models.mtp_model`.
    """

    model: Model
    observes_prompts = True
    passes_by_update = 1
    stage = MTP  # name in reports of tree "auto"

    def previous(self, update: Update) -> jax.Array:
        """Returns what the layers read beside each token of an update,
        [B, M + 1, d]."""
        return update.hidden

    def init(self, prompts: Prompts, past: Any) -> MTPState:
        """Returns a state with capacity for the prompts. Cached states of other kinds
        of drafters are ignored."""
        zeros, capacity = jnp.zeros_like(prompts.lengths), prompts.capacity
        if isinstance(past, MTPState):
            return replace(past, state=grow(past.state, capacity), passes=zeros)
        config, dtype = self.model.config, param_dtype(self.model.params)
        state = init_state(config, zeros.shape[0], capacity, dtype)
        hidden = jnp.zeros((zeros.shape[0], 1, config.d_model), jnp.float32)
        return MTPState(state, hidden, zeros)

    def propose(
        self,
        state: MTPState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, MTPState]:
        # `depth` - 1 passes for the levels below the first, and one in `commit` that
        # reads the accepted tokens.
        state = replace(state, passes=state.passes + max(tree.depth, 1))
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Tree)  # checked by `MTPSource.check_tree`
        args = (self.model, state.state, root, state.hidden, tree, dist, rule)
        return fill_tree(*args, hands_down=True), state

    def commit(self, state: MTPState, update: Update) -> MTPState:
        hidden, after = extend(
            self.model,
            state.state,
            update.tokens,
            update.length,
            previous=self.previous(update),
        )
        last = update.last_of(hidden, state.hidden[:, 0])[:, None]
        return replace(state, state=after, hidden=last)

    def search(self, state: MTPState, query: Query) -> tuple[MTPState, Search]:
        model, batch = self.model, state.passes.shape[0]
        start = nothing_grown(model, batch, query.width, query.depth)
        handed = jnp.zeros((batch, query.width * query.depth, model.config.d_model))
        handed = jnp.concatenate([state.hidden, handed.astype(jnp.float32)], axis=1)
        start = replace(start, records=(start.records, handed))
        guesser = by_model(model, state.state, hands_down=True)
        at_root = logits_of(model, state.hidden)
        return state, Search(at_root, guesser, start, any_level(query), jnp.int32(0))

    @property
    def of_target(self) -> Any:
        return {name: x for name, x in self.model.params.items() if name != "mtp"}

    def reads(self, state: MTPState, menu: Sequence[Topology]) -> list[Reads]:
        weights = weights_read(self.model)
        return [Reads("drafter", state.passes, weights, state=state.state)]

    def search_reads(
        self, state: MTPState, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        return [Reads(self.stage, passes, weights_read(self.model), state=state.state)]

    def key(self) -> str:
        return f"{self.stage} {model_key(self.model)}"
