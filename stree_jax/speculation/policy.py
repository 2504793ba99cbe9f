"""Which tree a step drafts: the protocol of policies, and one tree for ever."""

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.speculation.accept import Accepted, Rule
from stree_jax.speculation.decoding import Decoding, PolicyState
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.tree import Topology


class Policy(Protocol):
    """A menu of trees, and pure functions that choose from it step by step."""

    @property
    def menu(self) -> tuple[Topology, ...]:
        """The trees; their number and sizes are static.

        Each has a compiled step, of its own or in the room of a larger one:
        `tree.compiled_steps`. Plain decoding is `chain(0)`.
        """
        ...

    def with_rows(self, rows: str | None) -> "Policy":
        """Returns the policy of a batch whose rows are spread over an axis of a mesh;
        see `Spec.rows`."""
        ...

    def init(self, batch: int) -> PolicyState: ...

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> jax.Array | None:
        """Returns bool [], whether a draft model reads the prompts first; None for yes.
        Otherwise it reads them when it first drafts."""
        ...

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        """Set `choice`, the place in the menu of the next step's tree.

        The drafter may be asked to look ahead, so `drafting` and `policy` may change.
        """
        ...

    def update(
        self, state: PolicyState, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[PolicyState, jax.Array]:
        """Learn what the chosen tree gained.

        Returns:
          the state, and the choice for the next step, or `OPEN`: `choose` is asked.
        """
        ...


def keeps_by_row(policy: Policy) -> Any:
    """Returns which leaves of a policy's state have rows first; the others are of the
    whole batch."""
    two, three = (jax.eval_shape(partial(policy.init, rows)) for rows in (2, 3))
    return jax.tree.map(lambda a, b: a.shape != b.shape, two, three)


@struct.dataclass
class FixedTree:
    """One tree at every step."""

    tree: Topology

    @property
    def menu(self) -> tuple[Topology, ...]:
        return (self.tree,)

    def with_rows(self, rows: str | None) -> "FixedTree":
        return self

    def init(self, batch: int) -> None:
        return None

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> None:
        return None

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        return replace(decoding, choice=jnp.int32(0))

    def update(
        self, state: None, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[None, jax.Array]:
        return None, jnp.int32(0)
