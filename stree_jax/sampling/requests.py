"""The request of each row of a batch: sampling, limits and stops."""

from dataclasses import replace
from typing import Any

import jax
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.constraints import Constraints
from stree_jax.sampling.settings import SamplingRows


@register_for_export
@struct.dataclass
class StopAutomata:
    """Automata that find stop strings token by token (`sampling.stop_strings`).

    Attributes:
      table: [R, states, V] int32. The state after a token, -1 once a string is
        complete. The last state maps to -1, so that index -1 stays at -1.
      automaton: [B] int32. Index of each row's automaton, 0..R-1.
    """

    table: jax.Array
    automaton: jax.Array


@register_for_export
@struct.dataclass
class Requests:
    """Requests of B rows, constant while they are decoded.

    Attributes:
      max_new_tokens: [B] int32.
      min_new_tokens: [B] int32. New tokens before a stop token or string can end a row.
        If None, there is no minimum.
      stop_tokens: [B, n] int32, padded with -1.
      stop_strings: automata of stop strings, or None if no row has stop strings.
      sampling: sampling settings, or None if all rows are greedy.
      constraints: automata that the rows' texts follow, or None if no row has a
        constraint.
    """

    max_new_tokens: jax.Array
    min_new_tokens: jax.Array | None
    stop_tokens: jax.Array
    stop_strings: StopAutomata | None
    sampling: SamplingRows | None
    constraints: Constraints | None = None

    def with_shared(self, value: Any) -> "Requests":
        """Returns a copy in which the tables of automata, which all rows share, are
        replaced by `value`, for a pytree that describes the arrays of requests."""
        strings, constraints = self.stop_strings, self.constraints
        if strings is not None:
            strings = replace(strings, table=value)
        if constraints is not None:
            tables = "classes", "following", "may_end", "forced", "closing"
            constraints = replace(constraints, **dict.fromkeys(tables, value))
        return replace(self, stop_strings=strings, constraints=constraints)
