"""Drafts with EAGLE drafters (`models.drafters.eagle`): EAGLE-3, P-EAGLE, EAGLE-2.

An EAGLE drafter works like MTP layers: it reads a token of the text together with a
vector of the target's state that chose it, and a draft token together with the vector
that was handed down from its parent. P-EAGLE drafts all levels of a tree in one pass,
without knowing the tokens above them.

Letters: B rows, M depth of the tree, V tokens of the vocabulary, d width of the
drafter.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import (
    Model,
    ModelConfig,
    State,
    Taps,
    chain_nodes,
    extend,
    forward_hidden,
    grow,
    logits_of,
)
from stree_jax.models.base.keys import key_of
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.drafters.eagle import (
    Eagle,
    EagleConfig,
    EagleModel,
    eagle_model,
    init_eagle,
    masked,
    project,
)
from stree_jax.models.stack.boundaries import moved_boundaries, tap_of
from stree_jax.models.stack.memory import weights_read
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import by_depth, nothing_grown
from stree_jax.speculation.adaptive.search import Query, Search, any_level
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import DrafterBase, DraftState, Prompts, Update
from stree_jax.speculation.drafters.medusa import drawn_alike, fill_by_depth
from stree_jax.speculation.drafters.mtp import MTPDrafter
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.source import Source, Work, check_state
from stree_jax.speculation.tree import Auto, Topology, Tree

NAME = "eagle"
WIDTH = 5  # nodes per level of P-EAGLE with tree "auto"; levels take no further passes


@struct.dataclass
class EagleSource(Source):
    """An EAGLE drafter of the target."""

    value: Eagle
    name = NAME
    prefers_auto = True

    @classmethod
    def abstract(cls, config: EagleConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        make = partial(init_eagle, config, dtype=dtype)
        return cls(Eagle(jax.eval_shape(make, key_of(0)), config))

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def by_level(self) -> bool:  # type: ignore[override]
        return not self.value.config.parallel

    def check(self, target: Model) -> None:
        own, c = self.value.config, target.config
        trained = own.target or "the model that it was trained on"
        if own.target_width != c.d_model:
            raise ValueError(
                f"drafter: reads states {own.target_width} wide, but the target's are "
                f"{c.d_model} wide; use {trained}"
            )
        if own.num_tokens != c.num_tokens or (
            not own.own_embedding and own.vocab_size != c.vocab_size
        ):
            raise ValueError(
                f"drafter: has {own.num_tokens} tokens, but the target has "
                f"{c.num_tokens}; use {trained}"
            )
        taps_of(own, target)

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Auto):
            return
        if not isinstance(tree, Tree):
            raise ValueError(
                "tree: an EAGLE drafter fills a fixed tree, such as 'E' or 'chain:4', "
                "or 'auto'; beams need a draft model"
            )
        c = self.value.config
        if c.parallel and tree.depth > c.levels:
            raise ValueError(
                f"tree: {tree.depth} levels, but the drafter has {c.levels} (P-EAGLE)"
            )

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if isinstance(past, EagleState):
            model = eagle_model(self.value, target)
            check_state("past: of another EAGLE drafter", model, past.state, batch)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        kind = ParallelEagleDrafter if self.value.config.parallel else EagleDrafter
        taps = taps_of(self.value.config, target)
        return kind(eagle_model(self.value, target), taps)

    def acceptance(self) -> Acceptance:
        c, table = self.value.config, super().acceptance()
        return Acceptance(table.p[: c.levels]) if c.parallel else table

    @property
    def search_size(self) -> tuple[int, int]:
        c = self.value.config
        return (WIDTH, c.levels) if c.parallel else super().search_size

    @property
    def kind(self) -> str:
        return self.value.config.kind

    def readings(self, target: Model) -> dict[str, Any]:
        c = self.value.config
        return {
            name: replace(self.value, config=replace(c, **fields))
            for name, fields in _other_options(c, target.config).items()
        }

    def work(self, target: Model) -> Work:
        model = eagle_model(self.value, target)
        if self.value.config.parallel:
            return Work(read_once=2 * weights_read(model))
        return Work((model,))


def _other_options(c: EagleConfig, target: ModelConfig) -> dict[str, dict[str, Any]]:
    """Returns architectures of an EAGLE drafter, each with one option changed that its
    config may state wrongly, by a description."""
    moved = moved_boundaries(c.boundaries, target)
    found: dict[str, dict[str, Any]] = {
        name: dict(boundaries=others) for name, others in moved.items()
    }
    if c.fused:
        return found

    def flip(field: str, spelling: str) -> None:
        stated = getattr(c, field)
        name = f"{'without' if stated else 'with'} {spelling}"
        found[name] = {field: not stated}

    flip("norm_residual", "norm_before_residual")
    if c.final_norm and not c.parallel:
        flip("hands_down_normed", "norm_output")
    if c.input_norm != "none":
        found["without the norm before fc"] = dict(input_norm="none")
    return found


def taps_of(c: EagleConfig, target: Model) -> Taps:
    """Returns the taps of the streams that a drafter reads.

    Raises:
      ValueError: the target does not have these layers.
    """
    return tuple(tap_of(target.config, b) for b in c.boundaries)


@register_for_export
@struct.dataclass
class EagleState:
    """The state of an EAGLE drafter, after all tokens of the text except the first.

    If the text continues a finished one, the tokens of that one's last step are
    missing, because finished rows have no updates. This affects drafts only.

    Attributes:
      state: the layers' state, with their caches.
      hidden: [B, 1, d] float32. The vector that the root of the next tree hands down;
        0 before the first update.
      passes: [B] int32. Passes of the drafter since the prompts were read.
    """

    state: State
    hidden: jax.Array
    passes: jax.Array


@struct.dataclass
class EagleDrafter(MTPDrafter):
    """An EAGLE drafter that drafts level by level.

    Attributes:
      model: the drafter with its target's arrays.
      taps: the target's residual streams that it reads.
    """

    model: EagleModel
    taps: Taps = struct.field(pytree_node=False, default=())
    stage = NAME

    def previous(self, update: Update) -> jax.Array:
        c = self.model.config
        if c.fused or not (c.boundaries or c.project):
            return update.hidden
        streams = update.taps if c.boundaries else (update.hidden,)
        return project(self.model, streams)

    def init(self, prompts: Prompts, past: Any) -> Any:
        """Returns a state with capacity for the prompts. Cached states of other kinds
        of drafters are ignored."""
        if isinstance(past, EagleState):
            grown = grow(past.state, prompts.capacity)
            return replace(past, state=grown, passes=jnp.zeros_like(prompts.lengths))
        new = super().init(prompts, None)
        return EagleState(new.state, new.hidden, new.passes)

    def observe(self, state: Any, update: Update) -> Any:
        """Returns the state after a chunk of the prompts.

        In a drafter of one layer, keys and values depend on no attention, and only the
        last pair needs the whole layer. It is run alone, after all keys and values are
        in the cache, so that nothing is written to the cache after it is read.
        """
        model = self.model
        if len(model.config.layers) > 2:
            return self.commit(state, update)
        previous = self.previous(update)
        # XLA drops what only the unused hidden states need.
        _, after = extend(
            model, state.state, update.tokens, update.length, previous=previous
        )
        token, vector = (
            update.last_of(x, x[:, 0])[:, None] for x in (update.tokens, previous)
        )
        has_any = update.length > 0
        hidden, *_ = forward_hidden(
            model,
            replace(after, length=after.length - has_any.astype(jnp.int32)),
            token,
            chain_nodes(token.shape[0], 1, model.config.conv_taps),
            previous=vector,
        )
        hidden = jnp.where(has_any[:, None, None], hidden, state.hidden)
        return replace(state, state=after, hidden=hidden)

    @property
    def of_target(self) -> Any:
        c, params = self.model.config, self.model.params
        owned = {"embedding": c.own_embedding, "lm_head": c.own_head}
        return {n: params[n] for n, own in owned.items() if n in params and not own}


@struct.dataclass
class ParallelEagleDrafter(EagleDrafter):
    """A P-EAGLE drafter, which drafts all levels in one pass."""

    def propose(
        self,
        state: Any,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, Any]:
        # `commit` takes a pass, too.
        state = replace(state, passes=state.passes + (2 if tree.depth > 1 else 1))
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Tree)  # checked by `EagleSource.check_tree`
        logits = self.logits(state, tree.depth)
        return fill_by_depth(root, logits, tree, dist, rule), state

    def logits(self, state: Any, depth: int) -> jax.Array:
        """Returns the logits [B, depth, >= V] float32 of the tokens at depths 1 ..
        `depth` below the next root."""
        model, hidden, count = self.model, state.hidden, depth - 1
        if count:
            batch, _, d = hidden.shape
            mask = jnp.int32(model.config.mask_token or 0)
            below, _, _ = forward_hidden(
                model,
                state.state,
                jnp.broadcast_to(mask, (batch, count)),
                chain_nodes(batch, count, model.config.conv_taps),
                previous=jnp.broadcast_to(masked(model), (batch, count, d)),
            )
            hidden = jnp.concatenate([hidden, below], axis=1)
        return logits_of(model, hidden)

    def search(self, state: Any, query: Query) -> tuple[Any, Search]:
        logits = self.logits(state, query.depth)
        guesser = by_depth(logits, drawn_alike(query.dist, query.rule))
        start = nothing_grown(None, logits.shape[0], query.width, query.depth)
        step = any_level(query), jnp.int32(1), False
        return state, Search(logits[:, :1], guesser, start, *step)

    def logit_rows(self, tree: Topology) -> int:
        return tree.depth
