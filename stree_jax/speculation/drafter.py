"""The protocol of drafters, which propose trees of tokens, and plain decoding.

Letters: B rows (Bp prompts before samples are made of them), T nodes, M depth of the
tree, V tokens of the vocabulary, d width of the target's hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import (
    Model,
    ModelConfig,
    State,
    Tapped,
    Taps,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.tree import Topology

DraftState = Any  # a drafter's own pytree; the first axis of every leaf is the row's


@struct.dataclass
class Prompts:
    """Texts to be continued; their last tokens are the first trees' roots.

    Attributes:
      token_ids: [Bp, S] int32, padded on the right.
      lengths: [Bp] int32, at least 1.
      capacity: tokens of text that buffers need to hold.
      update_width: most tokens in one `Update` after the prompts.
      read: bool [], of `Policy.reads_prompts`. If None, prompts are read.
    """

    token_ids: jax.Array
    lengths: jax.Array
    capacity: int = struct.field(pytree_node=False)
    update_width: int = struct.field(pytree_node=False)
    read: jax.Array | None = None


@struct.dataclass
class Update:
    """Tokens that a step added to the text, and the target's states behind them.

    After a step, M + 1 tokens wide; a chunk of the prompts is an update, too.

    Attributes:
      tokens: [B, M + 1] int32, the accepted tokens. The last valid one is the root of
        the next tree.
      length: [B] int32. Only the first `length` tokens are valid. It is 0 for a row
        that has finished: its last tokens are part of the prompt of a continuation.
      hidden: [B, M + 1, d] float32, after the final norm: `hidden[b, j]` are the states
        whose logits `tokens[b, j]` was chosen by.
      taps: for each of the drafter's `taps`, [B, M + 1, d] float32, the residual stream
        at the same places as `hidden`; see `models.forward_tapped`.
    """

    tokens: jax.Array
    length: jax.Array
    hidden: jax.Array
    taps: Tapped = ()

    @property
    def last(self) -> jax.Array:
        """[B, 1] int32, the index of the last valid token; 0 if a row has no token."""
        return jnp.maximum(self.length - 1, 0)[:, None]

    def last_of(self, table: jax.Array, before: jax.Array) -> jax.Array:
        """Returns table [B, M + 1, ...] at the last valid token of each row, and
        `before` [B, ...] for rows without valid tokens."""
        beside = [1] * (table.ndim - 2)
        at = self.last.reshape(-1, 1, *beside)
        found = jnp.take_along_axis(table, at, axis=1)[:, 0]
        return jnp.where((self.length > 0).reshape(-1, *beside), found, before)


class Drafter(Protocol):
    """Pure functions over a state; a pytree whose leaves are parameters.

    `DrafterBase` has defaults for all else that a drafter may say about itself.
    """

    def init(self, prompts: Prompts, past: DraftState | None) -> DraftState:
        """Returns the state after the prompts, or after a `past` that has read a
        beginning of them."""
        ...

    def propose(
        self,
        state: DraftState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, DraftState]:
        """Fills a tree below the roots [B] int32; a tree of one node is the root."""
        ...

    def commit(self, state: DraftState, update: Update) -> DraftState:
        """Takes in an update; steps without drafts have one, too."""
        ...


@dataclass(frozen=True)
class Reads:
    """What one stage of drafting reads during a generation.

    Attributes:
      stage: its name, such as "drafter".
      passes: [B] int32, passes of a model, or of the model that a table guesses for.
      weights: bytes of weights that each read takes.
      each: reads a pass.
      state: of a model, which passes and commits read and write.
    """

    stage: str
    passes: Any
    weights: int
    each: int = 1
    state: State | None = None


class DrafterBase(Drafter):
    """Defaults of what the loop, tree "auto" and `sizing` ask of a drafter.

    A custom drafter may inherit it, or only have the members that it changes.

    Attributes:
      taps: layers of the target whose residual stream the drafter wants, counted from
        0: `Update.taps` has them, and `models.forward_tapped` says what they are.
    """

    taps: Taps = ()

    @property
    def observes_prompts(self) -> bool:
        """True if prompts come as updates, chunk by chunk after `init`, with the
        target's hidden states and taps."""
        return bool(self.taps)

    def observe(self, state: DraftState, update: Update) -> DraftState:
        """Takes in a chunk of the prompts; the same as `commit` unless overridden."""
        return self.commit(state, update)

    @property
    def models(self) -> tuple[Model, ...]:
        """Models that run passes of their own to draft, the outermost first; unless
        overridden, all models in the drafter's pytree."""
        parts = jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, Model))
        return tuple(x for x in parts if isinstance(x, Model))

    @property
    def of_target(self) -> Any:
        """A pytree of the target's arrays that the drafter holds, too."""
        return ()

    def logit_rows(self, tree: Topology) -> int:
        """Returns how many rows of logits are held at once, by row of the batch, beside
        those of the `models`."""
        return 0

    def reads(self, state: DraftState, menu: Sequence[Topology]) -> list[Reads]:
        """Returns what drafting has read, the outermost stage first.

        Args:
          menu: the trees that steps may have.
        """
        return []

    def key(self) -> str:
        """Returns what measured step times depend on."""
        shapes = [f"{jnp.result_type(x)}{jnp.shape(x)}" for x in jax.tree.leaves(self)]
        return f"{type(self).__name__} {' '.join(shapes)}"


def model_key(model: Model) -> str:
    """Returns what the seconds of a model's passes depend on."""
    return f"{_config_key(model.config)} {model.weight_format}"


@cache
def _config_key(config: ModelConfig) -> str:
    return str(config)


def kept(state: DraftState) -> DraftState:
    """Returns what of a drafter's state a continuation needs: `state.kept()` if the
    state has that method, else all of it."""
    return state.kept() if hasattr(state, "kept") else state


@struct.dataclass
class NoDrafter(DrafterBase):
    """Plain decoding: no drafts, no state."""

    def init(self, prompts: Prompts, past: DraftState | None) -> None:
        return None

    def propose(
        self,
        state: None,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, None]:
        return only_root(root), None

    def commit(self, state: None, update: Update) -> None:
        return None
