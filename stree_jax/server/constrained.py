"""The constraints of the rows of the server's batch.

Constrained rows need a program of their own: the first constrained request compiles it.
Sizes are powers of two, so that it serves later constraints of similar size.
"""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.constraints.rows import padded_shape, stacked
from stree_jax.constraints.token_tables import TokenTables
from stree_jax.sampling.constraints import NONE, Constraints
from stree_jax.speculation.decoding import Decoding

# Entries of an automaton that later ones are padded to. A larger one, such as that of a
# long reasoning budget, would make every later batch take its memory.
MOST_PADDED = 2**21


class ConstrainedRows:
    """The automata of the rows, and the states that the rows have reached."""

    def __init__(self, rows: int) -> None:
        """Makes rows without constraints.

        Args:
          rows: B.
        """
        self._tables: list[TokenTables | None] = [None] * rows
        self._active = [False] * rows
        self._states = jnp.full((rows,), NONE, jnp.int32)
        self._constraints: Constraints | None = None
        self._sizes = 0, 0  # of the largest automaton so far, up to MOST_PADDED

    def set(self, row: int, tables: TokenTables | None) -> None:
        """Gives a row another constraint before its first token, or none."""
        if tables is None and not self._active[row]:
            return
        self._active[row], self._tables[row] = tables is not None, tables
        self._states = self._states.at[row].set(NONE if tables is None else 0)
        if tables is not None:
            self._constraints = None
            own = tables.following.shape
            sizes = max(self._sizes[0], own[0]), max(self._sizes[1], own[1])
            if prod(padded_shape(*sizes)) <= MOST_PADDED:
                self._sizes = sizes

    def part_of(self, d: Decoding) -> Decoding:
        """Returns a batch with the constraints, if any row has one."""
        if not any(self._active):
            return d
        if self._constraints is None:
            given = [one for one in self._tables if one is not None]
            # Rows without a constraint are in state `NONE` and follow any automaton.
            tables = stacked([one or given[0] for one in self._tables], *self._sizes)
            which = np.arange(len(self._tables), dtype=np.int32)
            start = np.full_like(which, NONE)
            arrays = map(jax.device_put, (*tables, which, start))
            self._constraints = Constraints(*arrays)
        requests = replace(d.requests, constraints=self._constraints)
        # A copy, because the program donates its argument.
        return replace(d, requests=requests, constraint_state=self._states + 0)

    def without(self, d: Decoding) -> Decoding:
        """Returns the batch after a program without the constraints, whose states are
        kept here."""
        if d.constraint_state is None:
            return d
        self._states, self._constraints = d.constraint_state, d.requests.constraints
        requests = replace(d.requests, constraints=None)
        return replace(d, requests=requests, constraint_state=None)
