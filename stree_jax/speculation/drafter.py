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

DraftState = Any  # a pytree chosen by the drafter; each leaf has the rows as first axis


@struct.dataclass
class Prompts:
    """Texts to be continued. Their last tokens are the roots of the first trees.

    Attributes:
      token_ids: [Bp, S] int32, padded on the right.
      lengths: [Bp] int32, at least 1.
      capacity: number of tokens of text for which buffers need space.
      update_width: maximum number of tokens in one `Update` after the prompts.
      read: [] bool, from `Policy.reads_prompts`. Whether a draft model prefills the
        prompts now; otherwise it does so when it first drafts. If None, it prefills
        them now.
    """

    token_ids: jax.Array
    lengths: jax.Array
    capacity: int = struct.field(pytree_node=False)
    update_width: int = struct.field(pytree_node=False)
    read: jax.Array | None = None


@struct.dataclass
class Update:
    """Tokens that a step added to the text, and the target's hidden states there.

    After a step it is M + 1 tokens wide. A chunk of the prompts is an update, too, with
    the width of the chunk.

    Attributes:
      tokens: [B, M + 1] int32. The accepted tokens. The last valid one is the root of
        the next tree.
      length: [B] int32. Only the first `length` tokens are valid. It is 0 for a
        finished row; a continuation reads its last tokens again, as part of the prompt.
      hidden: [B, M + 1, d] float32. Hidden states after the final norm: the logits of
        `hidden[b, j]` chose `tokens[b, j]`.
      taps: for each of the drafter's `taps`, [B, M + 1, d] float32. The residual stream
        at the same positions as `hidden`; see `models.forward_tapped`.
    """

    tokens: jax.Array
    length: jax.Array
    hidden: jax.Array
    taps: Tapped = ()

    @property
    def last(self) -> jax.Array:
        """[B, 1] int32. Index of the last valid token; 0 if a row has no valid
        token."""
        return jnp.maximum(self.length - 1, 0)[:, None]

    def last_of(self, table: jax.Array, before: jax.Array) -> jax.Array:
        """Returns table [B, M + 1, ...] at the last valid token of each row, and
        `before` [B, ...] for rows without valid tokens."""
        trailing = [1] * (table.ndim - 2)
        index = self.last.reshape(-1, 1, *trailing)
        found = jnp.take_along_axis(table, index, axis=1)[:, 0]
        return jnp.where((self.length > 0).reshape(-1, *trailing), found, before)


class Drafter(Protocol):
    """A drafter: pure functions over a state. It is a pytree whose leaves are
    parameters.

    `DrafterBase` adds optional members, with defaults.
    """

    def init(self, prompts: Prompts, past: DraftState | None) -> DraftState:
        """Returns the state after the prompts.

        Args:
          prompts: the texts to be continued.
          past: a state that has already read a prefix of each prompt, or None.
        """
        ...

    def propose(
        self,
        state: DraftState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, DraftState]:
        """Proposes tokens for the nodes of a tree.

        Args:
          state: state after the text.
          root: [B] int32. The last token of the text, which is the tree's root.
          tree: the tree to fill. A tree of one node is only the root.
          dist: the distribution from which the target chooses the tokens below the
            root.
          rule: the acceptance rule, which says how tokens are drawn.

        Returns:
          The draft and the new state.
        """
        ...

    def commit(self, state: DraftState, update: Update) -> DraftState:
        """Returns the state after an update. Steps of plain decoding have an update,
        too."""
        ...


@dataclass(frozen=True)
class Reads:
    """The memory traffic of one stage of drafting during a generation.

    Attributes:
      stage: name of the stage, such as "drafter".
      passes: [B] int32. Forward passes of the stage's model; for a table of n-grams,
        passes of the model for which it guesses.
      weights: bytes of weights per read.
      each: number of reads per pass.
      state: the state that a model's passes and commits read and write, or None.
    """

    stage: str
    passes: Any
    weights: int
    each: int = 1
    state: State | None = None


class DrafterBase(Drafter):
    """Default values of the members that the loop, tree "auto" and `sizing` use.

    A custom drafter may inherit from it, or define only the members that it changes.

    Attributes:
      taps: layers of the target, counted from 0, whose residual stream the drafter
        uses. `Update.taps` contains them; see `models.forward_tapped`.
    """

    taps: Taps = ()

    @property
    def observes_prompts(self) -> bool:
        """True if the drafter receives the prompts through `observe`, chunk by chunk
        after `init`, with the target's hidden states and taps."""
        return bool(self.taps)

    def observe(self, state: DraftState, update: Update) -> DraftState:
        """Returns the state after a chunk of the prompts; `commit` unless
        overridden."""
        return self.commit(state, update)

    @property
    def models(self) -> tuple[Model, ...]:
        """Models whose forward passes draft, the outermost first. Unless overridden,
        all models in the drafter's pytree."""
        parts = jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, Model))
        return tuple(x for x in parts if isinstance(x, Model))

    @property
    def of_target(self) -> Any:
        """A pytree of the arrays that the drafter shares with the target."""
        return ()

    def logit_rows(self, tree: Topology) -> int:
        """Returns the number of rows of logits, per row of the batch, that are held at
        once in addition to those of the `models`."""
        return 0

    def reads(self, state: DraftState, menu: Sequence[Topology]) -> list[Reads]:
        """Returns the memory traffic of drafting so far, the outermost stage first.

        Args:
          menu: the trees that steps may use.
        """
        return []

    def key(self) -> str:
        """Returns a key: drafters with equal keys have the same measured step times."""
        shapes = [f"{jnp.result_type(x)}{jnp.shape(x)}" for x in jax.tree.leaves(self)]
        return f"{type(self).__name__} {' '.join(shapes)}"


def model_key(model: Model) -> str:
    """Returns a key: models with equal keys have the same measured pass times."""
    return f"{_config_key(model.config)} {model.weight_format}"


@cache
def _config_key(config: ModelConfig) -> str:
    return str(config)


def kept(state: DraftState) -> DraftState:
    """Returns the part of a drafter's state that a continuation needs: `state.kept()`
    if the state has that method, else the whole state."""
    return state.kept() if hasattr(state, "kept") else state


@struct.dataclass
class NoDrafter(DrafterBase):
    """The drafter of plain decoding, which drafts only the root and has no state."""

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
