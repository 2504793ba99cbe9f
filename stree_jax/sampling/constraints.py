"""Constraints on the device: which tokens a row may choose next, by automata of tokens.

Each row follows an automaton. Its state is known at every node of a draft tree, so that
the target's scores are masked before an acceptance rule compares them: the output has
the distribution of plain decoding under the same masks.

Tokens that lead to the same state from every state are a class. A table by state and
class is small, where one by state and token would take 60 MB.

Letters: B rows, Q nodes, R automata, S states, C classes, V tokens, L forced tokens.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models.base.serialization import register_for_export

MOST_CLOSING = 4  # tokens that are added to the end of a text without a pass
NONE = -1  # after a token that is not allowed; and of rows without a constraint


@register_for_export
@struct.dataclass
class Constraints:
    """The automata that B rows follow, see `constraints.token_tables`.

    Attributes:
      classes: [R, V] int32. Class of each token.
      following: [R, S, C] int32. State after a token of each class; `NONE` if it is not
        allowed.
      may_end: [R, S] bool. True for states in which the text is complete, so that a
        stop token is allowed.
      forced: [R, S, L] int32. Tokens that spell what must follow a state, padded with
        `NONE`. They are drafts: other tokens may spell the same.
      closing: [R, S] int32. The only token that is allowed in a state, if the text can
        only go on by such tokens until it is complete; else `NONE`.
      automaton: [B] int32. Index of each row's automaton, 0..R-1.
      start: [B] int32. State of each row before its first token; `NONE` for rows
        without a constraint, which stay in it.
    """

    classes: jax.Array
    following: jax.Array
    may_end: jax.Array
    forced: jax.Array
    closing: jax.Array
    automaton: jax.Array
    start: jax.Array

    def _index(self, state: jax.Array) -> jax.Array:
        """Returns the automata of states [B, ...], with as many axes."""
        return self.automaton.reshape(-1, *[1] * (state.ndim - 1))

    def after(self, state: jax.Array, token: jax.Array) -> jax.Array:
        """Returns the states after tokens.

        Args:
          state, token: [B, ...] int32.
        """
        which = self._index(state)
        after = self.following[which, state, self.classes[which, token]]
        return jnp.where(state < 0, NONE, after)

    def along(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the state after each of a sequence of tokens.

        Args:
          state: [B, ...] int32. States before the tokens.
          tokens: [B, ..., D] int32.

        Returns:
          [B, ..., D] int32.
        """

        def one(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            after = self.after(state, token)
            return after, after

        states = lax.scan(one, state, jnp.moveaxis(tokens, -1, 0))[1]
        return jnp.moveaxis(states, 0, -1)

    def allowed(self, state: jax.Array, stop: jax.Array) -> jax.Array:
        """Returns which tokens may follow each state [B, Q, V] bool.

        In state `NONE` all may: it is that of rows without a constraint, of nodes that
        cannot be accepted, and of nodes whose state is unknown.

        Args:
          state: [B, Q] int32.
          stop: [B, V] bool. The stop tokens of each row.
        """
        which = self._index(state)
        row = self.following[which, state] >= 0  # [B, Q, C]
        classes = self.classes[self.automaton][:, None]
        found = jnp.take_along_axis(row, classes, axis=2)
        found |= stop[:, None] & self.may_end[which, state][..., None]
        return found | (state < 0)[..., None]

    def complete(self, state: jax.Array) -> jax.Array:
        """Returns True for the states [B, ...] after which nothing can follow."""
        which = self._index(state)
        goes_on = (self.following[which, state] >= 0).any(axis=-1)
        return (state >= 0) & self.may_end[which, state] & ~goes_on

    def forced_after(self, state: jax.Array) -> jax.Array:
        """Returns the forced tokens [B, L] int32 after states [B]."""
        found = self.forced[self._index(state), state]
        return jnp.where((state < 0)[:, None], NONE, found)

    def closing_after(self, state: jax.Array) -> jax.Array:
        """Returns the tokens [B, MOST_CLOSING] int32 that complete the text after
        states [B], if no others are allowed; padded with `NONE`."""
        tokens = []
        for _ in range(MOST_CLOSING):
            token = self.closing[self._index(state), state]
            tokens.append(jnp.where(state < 0, NONE, token))
            after = self.after(state, jnp.maximum(tokens[-1], 0))
            state = jnp.where(tokens[-1] < 0, NONE, after)
        return jnp.stack(tokens, axis=1)

    def by_passes(self) -> "Constraints":
        """Returns the automata without `closing`: target passes choose all tokens, so
        that the target's state has read every text up to its last token."""
        return replace(self, closing=jnp.full_like(self.closing, NONE))
