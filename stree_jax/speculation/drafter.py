"""The protocol of drafters, which propose trees of tokens, and the drafter of plain
decoding.

During a generation the drafter has a state, a pytree of arrays. Its methods are pure
functions that return a new state: `init` after the prompts, `propose` at the start of
a step and `commit` at its end.

Letters: B rows, Bp prompts (a prompt may have several samples, which are rows), S width
of the prompts, T nodes, M depth of the tree, V tokens of the vocabulary, d width of the
target's hidden states.
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
from stree_jax.models.weights.parameters import storage_named
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.tree import Topology

DraftState = Any  # a pytree chosen by the drafter; each leaf has the rows as first axis


@struct.dataclass
class Prompts:
    """The prompts of a batch. Their last tokens are the roots of the first trees.

    Attributes:
      token_ids: [Bp, S] int32, padded on the right.
      lengths: [Bp] int32, at least 1.
      capacity: number of tokens, of prompt and output together, for which the drafter's
        buffers need space.
      update_width: maximum number of tokens in the `Update` of one step.
      read: [] bool, from `Policy.reads_prompts`. If True or None, a draft model
        prefills the prompts in `init`. If False, it prefills them when it first drafts.
      earlier: [Bp, E] int32. Tokens of earlier texts, see `EarlierTexts`; or None.
    """

    token_ids: jax.Array
    lengths: jax.Array
    capacity: int = struct.field(pytree_node=False)
    update_width: int = struct.field(pytree_node=False)
    read: jax.Array | None = None
    earlier: jax.Array | None = None


@struct.dataclass
class Update:
    """The tokens that a step added to the text, and the target's hidden states from
    which it predicted them.

    After a step, an update has M + 1 entries per row: M draft tokens at most, and the
    token that the target chose after them. During prefill, each chunk of the prompts is
    an update, with as many entries as the chunk has tokens.

    Attributes:
      tokens: [B, M + 1] int32. The accepted tokens. The last valid one is the root of
        the next tree.
      length: [B] int32. Only the first `length` tokens are valid. It is 0 for a
        finished row, even if its last tokens are new: if the row is continued later, a
        draft model reads them as part of the prompt.
      hidden: [B, M + 1, d] float32. The target's hidden states after the final norm.
        The target predicted `tokens[b, j]` from `hidden[b, j]`.
      taps: for each layer in the drafter's `taps`, its residual stream [B, M + 1, d]
        float32 at the same positions as `hidden`.
      read: [B] int32. The target's state has read the tokens of the first `read`
        entries of `hidden` and `taps`. It is `length`, but not 0 for a row that
        finishes in this step: if the row is continued later, these tokens are not read
        again. Unless given, it is `length`.
    """

    tokens: jax.Array
    length: jax.Array
    hidden: jax.Array
    taps: Tapped = ()
    read: jax.Array = None  # type: ignore[assignment]  # set by `__post_init__`

    def __post_init__(self) -> None:
        if self.read is None:
            object.__setattr__(self, "read", self.length)

    @property
    def last(self) -> jax.Array:
        """[B, 1] int32. Index of the last valid token; 0 if a row has no valid
        token."""
        return jnp.maximum(self.length - 1, 0)[:, None]

    def last_of(self, table: jax.Array, before: jax.Array) -> jax.Array:
        """Selects the entry of each row's last valid token.

        Args:
          table: [B, M + 1, ...]. Values at the tokens, such as `hidden`.
          before: [B, ...]. The result for rows without valid tokens.

        Returns:
          [B, ...].
        """
        trailing = [1] * (table.ndim - 2)
        index = self.last.reshape(-1, 1, *trailing)
        found = jnp.take_along_axis(table, index, axis=1)[:, 0]
        return jnp.where((self.length > 0).reshape(-1, *trailing), found, before)


class Drafter(Protocol):
    """The methods that every drafter has. A drafter is a pytree whose leaves are its
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
          tree: the shape of the tree. A tree of one node is only the root, for a step
            of plain decoding.
          dist: the distribution from which the target chooses the tokens below the
            root.
          rule: the acceptance rule, which says how tokens are drawn.

        Returns:
          The draft and the new state.
        """
        ...

    def commit(self, state: DraftState, update: Update) -> DraftState:
        """Returns the state after the tokens that a step added to the text. It is
        called after every step, including steps of plain decoding."""
        ...


@dataclass(frozen=True)
class Reads:
    """The memory traffic of one stage of drafting during a generation.

    A stage is a model or a table of n-grams. Most drafters have one stage; a staged
    drafter has several.

    Attributes:
      stage: name of the stage, such as "drafter".
      passes: [B] int32. Forward passes of the stage's model. For n-grams, the passes of
        the draft model whose tokens they guess.
      weights: bytes of weights that the stage reads.
      each: number of times that it reads them per pass.
      state: the model's state, which passes and replays read and write. None for a
        stage without a state.
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
      taps: indices, from 0, of the target's layers whose residual streams the drafter
        uses. It receives them in `Update.taps`.
      copies_caches: True if XLA copies the attention caches in the drafter's state at
        each step, because passes read them after or while others are written. It is
        used to estimate memory.
      looks_up: True if it drafts from `Prompts.earlier`.
      cuts_back: True if a cached state that has read more than a prefix of the prompts
        may be passed to `init` after each `models.State` in it was cut back to the
        prefix. `init` and the next update must then replace all its other arrays.
    """

    taps: Taps = ()
    copies_caches: bool = True
    looks_up: bool = False
    cuts_back: bool = False

    @property
    def observes_prompts(self) -> bool:
        """True if the drafter receives the prompts through `observe`, chunk by chunk
        after `init`, with the target's hidden states and taps."""
        return bool(self.taps)

    def observe(self, state: DraftState, update: Update) -> DraftState:
        """Returns the state after a chunk of the prompts. Unless overridden, it calls
        `commit`."""
        return self.commit(state, update)

    def read_for_cache(self, state: DraftState) -> DraftState:
        """Returns a state that may be cached and cut back: it has read what waits in
        it and what `init` cannot read again from the prompts. Unless overridden, it is
        the state itself."""
        return state

    @property
    def models(self) -> tuple[Model, ...]:
        """The draft models; in a staged drafter, the one that drafts for the target
        comes first. Unless overridden, all models in the drafter's pytree."""
        parts = jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, Model))
        return tuple(x for x in parts if isinstance(x, Model))

    @property
    def of_target(self) -> Any:
        """The arrays of the drafter that belong to the target, such as its embedding,
        as a pytree. Memory estimates count them only once."""
        return ()

    def logit_rows(self, tree: Topology) -> int:
        """Returns how many vectors of logits [V] the drafter holds at the same time for
        each row of the batch, in addition to those of its `models`. It is used to
        estimate memory."""
        return 0

    def reads(self, state: DraftState, menu: Sequence[Topology]) -> list[Reads]:
        """Returns the memory traffic of drafting so far: a `Reads` for each stage. The
        stage that drafts for the target comes first.

        Args:
          state: the drafter's state.
          menu: the trees that steps may use.
        """
        return []

    def key(self) -> str:
        """Returns a key: drafters with equal keys have the same measured step times."""
        shapes = [f"{jnp.result_type(x)}{jnp.shape(x)}" for x in jax.tree.leaves(self)]
        return f"{type(self).__name__} {' '.join(shapes)}"


def model_key(model: Model) -> str:
    """Returns a key: models with equal keys have the same measured pass times."""
    return f"{_config_key(model.config)} {storage_named(model.params)}"


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

    cuts_back = True

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
