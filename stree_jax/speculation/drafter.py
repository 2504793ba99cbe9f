"""What proposes a tree of tokens: the protocol of drafters, and none at all.

Letters: B rows (Bp prompts before samples are made of them), T nodes, M depth of the
tree, V tokens of the vocabulary, d width of the target's hidden states.
"""

from typing import Any, Protocol

import jax
from flax import struct

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
      capacity: tokens of text that there has to be room for.
      news_width: most tokens that one `Drafter.commit` brings.
      read: bool [], of `Policy.reads_prompts`; None: yes.
    """

    token_ids: jax.Array
    lengths: jax.Array
    capacity: int = struct.field(pytree_node=False)
    news_width: int = struct.field(pytree_node=False)
    read: jax.Array | None = None


@struct.dataclass
class News:
    """What a step made text of, as drafters are told.

    Attributes:
      tokens: [B, M + 1] int32, the accepted ones; the last that counts is the root of
        the next tree.
      length: [B] int32, how many count; 0 for a row that has finished, the last tokens
        of which no drafter reads: a continuation begins with them.
      hidden: [B, M + 1, d] float32, the target's state that chose each of them.
    """

    tokens: jax.Array
    length: jax.Array
    hidden: jax.Array


class Drafter(Protocol):
    """Pure functions over a state of its own; a pytree whose leaves are parameters.

    One with an attribute `hears_prompts` that is true goes by the target's hidden
    states: what a prompt's tokens are and were chosen by comes as news, chunk by chunk,
    so that `init` has only to make room.
    """

    def init(self, prompts: Prompts, past: DraftState | None) -> DraftState:
        """The state after the prompts, or after a `past` that has read their begin."""
        ...

    def propose(
        self,
        state: DraftState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, DraftState]:
        """Fill a tree below the roots [B] int32; one node is the root alone."""
        ...

    def commit(self, state: DraftState, news: News) -> DraftState:
        """Take in what became text; steps without drafts bring some too."""
        ...


@struct.dataclass
class NoDrafter:
    """Plain decoding: nothing is drafted, nothing kept."""

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

    def commit(self, state: None, news: News) -> None:
        return None
