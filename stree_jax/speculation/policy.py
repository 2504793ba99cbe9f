"""Which tree a step drafts: the protocol of policies, and one tree for ever."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.decoding import Decoding, PolicyState
from stree_jax.speculation.tree import Topology


class Policy(Protocol):
    """A menu of trees, and pure functions that choose from it step by step."""

    @property
    def menu(self) -> tuple[Topology, ...]:
        """The trees; their number and sizes are static.

        Each has a compiled step of its own. Plain decoding is `chain(0)`.
        """
        ...

    def init(self, batch: int) -> PolicyState: ...

    def choose(self, state: PolicyState, decoding: Decoding) -> jax.Array:
        """int32 [], place in the menu of the next step's tree."""
        ...

    def update(
        self, state: PolicyState, choice: jax.Array, accepted: Accepted
    ) -> PolicyState:
        """Learn what the chosen tree gained."""
        ...


@struct.dataclass
class FixedTree:
    """One tree at every step."""

    tree: Topology

    @property
    def menu(self) -> tuple[Topology, ...]:
        return (self.tree,)

    def init(self, batch: int) -> None:
        return None

    def choose(self, state: None, decoding: Decoding) -> jax.Array:
        return jnp.int32(0)

    def update(self, state: None, choice: jax.Array, accepted: Accepted) -> None:
        return None
