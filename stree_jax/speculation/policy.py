"""Policies, which choose the tree of each step: the protocol, and `FixedTree`, which
uses one tree for all steps.

The trees that a policy may choose are its menu. `step` explains the other terms.
"""

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
        """The trees that steps may use. Their number and sizes are static.

        A step is compiled for each tree; small trees may share one, see
        `tree.compiled_steps`. Plain decoding is the tree of only the root, `chain(0)`.
        """
        ...

    def init(self, batch: int) -> PolicyState:
        """Returns the state before the first step of a batch of rows."""
        ...

    def reads_prompts(self, drafter: Drafter, sampled: bool) -> jax.Array | None:
        """Decides when a draft model prefills the prompts.

        Args:
          drafter: the drafter.
          sampled: True if the rows are sampled, False for greedy decoding.

        Returns:
          [] bool. True: before the first step. False: when the draft model first
          drafts, which saves the time if it never does. None is the same as True.
        """
        ...

    def choose(
        self, decoding: Decoding, drafter: Drafter, rule: Rule, num_tokens: int
    ) -> Decoding:
        """Chooses the tree of the next step.

        The policy may let the drafter propose candidates before it chooses. Therefore
        the states of the drafter and the policy may change, too.

        Args:
          decoding: the batch before the step.
          drafter: the drafter of the step.
          rule: the acceptance rule.
          num_tokens: tokens of the vocabulary.

        Returns:
          The batch with `choice` set to the tree's index in the menu.
        """
        ...

    def update(
        self, state: PolicyState, choice: jax.Array, draft: Draft, accepted: Accepted
    ) -> tuple[PolicyState, jax.Array]:
        """Updates the state with the result of a step.

        Args:
          state: the policy's state.
          choice: [] int32. Index in the menu of the step's tree.
          draft: the step's tree.
          accepted: the accepted tokens.

        Returns:
          The state, and the menu index of the next step's tree. If it is `OPEN`,
          `choose` is called before the next step.
        """
        ...


def keeps_by_row(policy: Policy) -> Any:
    """Finds which arrays of a policy's state have one entry per row of the batch.

    Returns:
      A pytree like the state: True for arrays whose first axis is the rows, False for
      arrays that the whole batch shares.
    """
    two, three = (jax.eval_shape(partial(policy.init, rows)) for rows in (2, 3))
    return jax.tree.map(lambda a, b: a.shape != b.shape, two, three)


def has_rows(policy: Policy, d: Decoding) -> Decoding:
    """Returns a pytree of bools like `d`: True for leaves whose first axis is the rows.
    These are all leaves except the choice, the shared leaves of the policy's state, and
    the tables of automata."""
    marks = jax.tree.map(lambda _: True, d)
    marks = replace(marks, requests=marks.requests.with_shared(False))
    return replace(marks, choice=False, policy=keeps_by_row(policy))


@struct.dataclass
class FixedTree:
    """A policy that uses the same tree at every step."""

    tree: Topology

    @property
    def menu(self) -> tuple[Topology, ...]:
        return (self.tree,)

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
