"""What each row of a batch asks for: how to draw, how much, and when to stop."""

import jax
from flax import struct

from stree_jax.sampling.settings import SamplingRows


@struct.dataclass
class StopAutomata:
    """Automata that find stop strings token by token (`sampling.stop_strings`).

    Attributes:
      table: [R, states, V] int32, the state after a token, -1 once a string is
        complete; its last state is all -1, so that -1 stays.
      automaton: [B] int32, a row's automaton among R.
    """

    table: jax.Array
    automaton: jax.Array


@struct.dataclass
class Requests:
    """Wishes of B rows; constant while they are decoded.

    Attributes:
      max_new_tokens: [B] int32.
      min_new_tokens: [B] int32, new tokens before a stop token or string may end a
        row, or None where no row wants any.
      stop_tokens: [B, n] int32, padded with -1.
      stop_strings: None where no row has any.
      sampling: how rows are sampled; None: all are greedy.
    """

    max_new_tokens: jax.Array
    min_new_tokens: jax.Array | None
    stop_tokens: jax.Array
    stop_strings: StopAutomata | None
    sampling: SamplingRows | None
