"""Policies choose the tree of each step: the protocol, and a policy with one tree."""

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
    """A policy: a menu of trees, and pure functions that choose one at each step."""

    @property
    def menu(self) -> tuple[Topology, ...]:
        """The trees that steps may use; their number and sizes are static.

        Each has a compiled step, which several trees may share, see
        `tree.compiled_steps`. Plain decoding is `chain(0)`.
        """
        ...

    def with_rows(self, rows: str | None) -> "Policy":
        """Returns the policy for a batch whose rows are sharded over a mesh axis, see
        `Spec.rows`."""
        ...

    def init(self, batch: int) -> PolicyState:
        """Returns the state before the first step of a batch of rows."""
        ...

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> jax.Array | None:
        """Returns [] bool. True if a draft model prefills the prompts before the first
        step; otherwise it prefills them when it first drafts. None means True."""
        ...

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        """Returns the batch with `choice`, the index in the menu of the next tree.

        The policy may use the drafter to evaluate candidates, so `drafting` and
        `policy` may change, too.

        Args:
          decoding: the batch before the step.
          drafter: the drafter of the step.
          rule: the acceptance rule.
          num_tokens: tokens of the vocabulary.
        """
        ...

    def update(
        self, state: PolicyState, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[PolicyState, jax.Array]:
        """Updates the state with the result of a step.

        Returns:
          The state, and the choice for the next step; if it is `OPEN`, `choose` is
          called.
        """
        ...


def keeps_by_row(policy: Policy) -> Any:
    """Returns a pytree of bools like a policy's state: True for leaves whose first axis
    is the rows, False for leaves shared by the whole batch."""
    two, three = (jax.eval_shape(partial(policy.init, rows)) for rows in (2, 3))
    return jax.tree.map(lambda a, b: a.shape != b.shape, two, three)


@struct.dataclass
class FixedTree:
    """A policy that uses the same tree at every step."""

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
