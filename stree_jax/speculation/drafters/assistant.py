"""Drafts with assistants of Gemma 4 (`models.drafters.assistant`).

An assistant works like MTP layers: it reads the last token of the text together with
the target's hidden state that chose it, and each draft token together with a vector
that its parent hands down. Unlike MTP layers, it reads no other tokens: it sees the
text through keys and values of the target.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import Model, Taps
from stree_jax.models.base.keys import key_of
from stree_jax.models.drafters.assistant import (
    Assistant,
    AssistantConfig,
    AssistantModel,
    assistant_model,
    init_assistant,
    keep_keys,
    read_by_pass,
    read_root,
    source_layers,
    taps_of,
)
from stree_jax.speculation.drafter import DrafterBase, DraftState, Update
from stree_jax.speculation.drafters.mtp import MTPDrafter, MTPState
from stree_jax.speculation.source import Source, Work, check_state
from stree_jax.speculation.tree import Auto, Topology, Tree

NAME = "assistant"


@struct.dataclass
class AssistantSource(Source):
    """An assistant of the target."""

    value: Assistant
    name = NAME
    prefers_auto = True

    @classmethod
    def abstract(cls, config: AssistantConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        make = partial(init_assistant, config, dtype=dtype)
        return cls(Assistant(jax.eval_shape(make, key_of(0)), config))

    def check(self, target: Model) -> None:
        own, c = self.value.config, target.config
        for what, ours, theirs in (
            ("wide", own.target_width, c.d_model),
            ("tokens", own.vocab_size, c.vocab_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"drafter: an assistant of a target with {ours} {what}, but this "
                    f"one has {theirs}; use the model that it was trained on"
                )
        source_layers(own, c)
        if target.mesh is not None:
            raise ValueError(
                "drafter: an assistant needs a target on one device, and this one is "
                "on a mesh"
            )

    def check_tree(self, tree: Topology) -> None:
        if not isinstance(tree, Tree | Auto):
            raise ValueError(
                "tree: an assistant fills a fixed tree, such as 'E' or 'chain:4', or "
                "'auto'; beams need a draft model"
            )

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if isinstance(past, MTPState):
            model = assistant_model(self.value, target)
            check_state("past: of another assistant", model, past.state, batch)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        taps = taps_of(self.value.config, target.config)
        return AssistantDrafter(assistant_model(self.value, target), taps)

    @property
    def kind(self) -> str:
        return "MTP assistant"

    def work(self, target: Model) -> Work:
        return Work((read_by_pass(assistant_model(self.value, target)),))


@struct.dataclass
class AssistantDrafter(MTPDrafter):
    """A drafter with an assistant, which fills static trees or is searched by tree
    "auto".

    The state has keys and values of all tokens before the root of the next tree.

    Attributes:
      model: the assistant with its target's arrays.
      taps: the target's streams that enter the layers whose keys it reads.
    """

    model: AssistantModel
    taps: Taps = struct.field(pytree_node=False, default=())
    stage = NAME

    def commit(self, state: MTPState, update: Update) -> MTPState:
        after = keep_keys(self.model, state.state, update.taps, update.length)
        token, vector = (
            update.last_of(x, x[:, 0])[:, None] for x in (update.tokens, update.hidden)
        )
        hidden = read_root(self.model, after, token, vector)
        has_any = (update.length > 0)[:, None, None]
        hidden = jnp.where(has_any, hidden, state.hidden)
        return replace(state, state=after, hidden=hidden)

    @property
    def read_by_pass(self) -> Model:
        return read_by_pass(self.model)

    @property
    def of_target(self) -> Any:
        params = self.model.params
        sources = [f"sources_{i}" for i in range(self.model.config.sources)]
        return {name: params[name] for name in ("embedding", *sources)}
