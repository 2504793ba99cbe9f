"""Drafts with the target's layers for multi-token prediction (MTP).

MTP layers read a token of the text together with the target's hidden state that chose
it, and predict the next token. A draft token is read together with the MTP layers'
hidden state that predicted it, so the same layers draft every level of a tree. The
layers read all text, including the prompts, and discard the states of drafts.

Letters: B rows, M depth of the tree, d width of the target's hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.common.words import MTP
from stree_jax.models import (
    Model,
    ModelConfig,
    State,
    Taps,
    extend,
    format_named,
    grow,
    init_state,
    logits_of,
    mtp_model,
    param_dtype,
)
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.drafters.trimming import head_name, trimmed_head, with_head
from stree_jax.models.stack.memory import weights_read
from stree_jax.models.weights.parameters import as_weight, gathered
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
            layers = self.layers(target)
            check_state("past: of other MTP layers", layers, past.state, batch)

    def layers(self, target: Model) -> Model:
        """Returns the layers as a model, see `models.mtp_model`."""
        return mtp_model(target)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return MTPDrafter(self.layers(target))

    @property
    def kind(self) -> str:
        return "MTP"

    def readings(self, target: Model) -> dict[str, Any]:
        return {"before the target's final norm": BeforeNormSource(self)}

    def work(self, target: Model) -> Work:
        return Work((self.layers(target),))


@struct.dataclass
class BeforeNormSource(Source):
    """The MTP layers, but with the target's hidden states before its final norm as
    input. `check-drafter` compares it with the right input, because some converters
    confuse the two.

    Attributes:
      value: the source of the same layers with the right input.
    """

    value: MTPSource
    name = MTP

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        last = len(target.config.layers) - 1
        return BeforeNormDrafter(self.value.layers(target), (last,))


@register_for_export
@struct.dataclass
class TrimmedMTP:
    """The drafter "mtp" with a head that predicts only some of the tokens.

    Attributes:
      head: [D, d]. The rows of the target's head.
      ids: [D] int32. Their tokens.
    """

    head: Any
    ids: jax.Array


@dataclass(frozen=True)
class TrimmedMTPConfig:
    """The architecture of a `TrimmedMTP`.

    Attributes:
      target: the target's architecture.
      rows: D.
    """

    target: ModelConfig
    rows: int


def trimmed_mtp(target: Model, ids: Any) -> TrimmedMTP:
    """Returns the drafter "mtp" of a target that drafts only the tokens `ids` [D]
    int32, which are all different."""
    ids = jnp.asarray(ids, jnp.int32)
    return TrimmedMTP(trimmed_head(target, ids), ids)


@struct.dataclass
class TrimmedMTPSource(MTPSource):
    """The target's MTP layers with a smaller head."""

    # The base class declares `value` as the constant "mtp".
    value: TrimmedMTP  # type: ignore[assignment]
    name = MTP

    @classmethod
    def abstract(cls, config: TrimmedMTPConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        c, name = config.target, head_name(config.target)
        head = format_named(dtype).abstract((c.vocab_size, c.d_model), (name,))
        ids: Any = jax.ShapeDtypeStruct((config.rows,), jnp.int32)
        return cls(TrimmedMTP(jax.eval_shape(gathered, head, ids), ids))

    def check(self, target: Model) -> None:
        super().check(target)
        width, d = as_weight(self.value.head).shape[1], target.config.d_model
        if width != d:
            raise ValueError(
                f"drafter: its head is of a model {width} wide, but the target is {d} "
                "wide; make it for this target"
            )

    def layers(self, target: Model) -> Model:
        return with_head(mtp_model(target), self.value.head, self.value.ids)


@register_for_export
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
    cuts_back = True
    passes_by_update = 1
    stage = MTP  # name in reports of tree "auto"

    def previous(self, update: Update) -> jax.Array:
        """Returns the vectors [B, M + 1, d] that the layers read with the tokens of an
        update: the target's hidden states."""
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
        own = {"mtp", "lm_head", "head_ids"} if self.model.config.head_rows else {"mtp"}
        return {name: x for name, x in self.model.params.items() if name not in own}

    @property
    def read_by_pass(self) -> Model:
        """The model with the arrays that a pass over draft tokens reads."""
        return self.model

    def reads(self, state: MTPState, menu: Sequence[Topology]) -> list[Reads]:
        weights = weights_read(self.read_by_pass)
        return [Reads("drafter", state.passes, weights, state=state.state)]

    def search_reads(
        self, state: MTPState, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        weights = weights_read(self.read_by_pass)
        return [Reads(self.stage, passes, weights, state=state.state)]

    def key(self) -> str:
        return f"{self.stage} {model_key(self.model)}"


@struct.dataclass
class BeforeNormDrafter(MTPDrafter):
    """The drafter of `BeforeNormSource`.

    Attributes:
      taps: the target's last layer.
    """

    taps: Taps = struct.field(pytree_node=False, default=())

    def previous(self, update: Update) -> jax.Array:
        return update.taps[0]
