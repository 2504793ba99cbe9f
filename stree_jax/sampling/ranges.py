"""Ranges of sampling settings, for one number and for arrays of numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stree_jax.common.checks import as_integer, as_real, shown

_FLOAT32 = np.finfo(np.float32)
LEAST, MOST = float(_FLOAT32.tiny), float(_FLOAT32.max)  # devices flush less to 0
MOST_BIAS = 1e6  # adding more would round logits away
_FLOATS = f"a number in {LEAST:.2g}..{MOST:.2g} (float32)"


@dataclass(frozen=True)
class Range:
    """The values that a setting may have.

    Attributes:
      want: what they are, for messages.
      holds: returns True for a number of the range, or an array of bools for a NumPy
        array of numbers.
      whole: True if they are integers.
    """

    want: str
    holds: Callable[[Any], Any]
    whole: bool = False

    def number(self, name: str, value: Any) -> Any:
        """Returns the value as an int or a float of Python.

        Raises:
          ValueError: it is not a number, or not in the range.
        """
        found = as_integer(value) if self.whole else as_real(value)
        if found is None or not self.holds(found):
            raise ValueError(f"{name}: want {self.want}, got {shown(value)}")
        return found

    def check(self, name: str, values: Any) -> None:
        """Raises ValueError if an array, or nested lists, have values of another type,
        or if values that are known are not in the range. Values that `jax.jit` traces,
        and those on devices of other processes, are unknown."""
        table = _known(values)
        kinds = (np.integer,) if self.whole else (np.integer, np.floating)
        dtype = getattr(values if table is None else table, "dtype", None)
        if dtype is not None and not any(jax.numpy.issubdtype(dtype, k) for k in kinds):
            raise ValueError(f"{name}: want {self.want}, got {shown(values)}")
        if table is not None:
            exact = table if self.whole else table.astype(np.float64)
            wrong = exact[~self.holds(exact)]
            if wrong.size:
                raise ValueError(f"{name}: want {self.want}, got {wrong[0].item()}")


def _known(values: Any) -> np.ndarray | None:
    """Returns an array, or nested lists, as a NumPy array; None if a part is unknown.
    For lists of different lengths, an array of no numbers."""
    for part in jax.tree.leaves(values):
        traced = isinstance(part, jax.core.Tracer)
        if traced or (isinstance(part, jax.Array) and not part.is_fully_addressable):
            return None
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        return np.asarray(None)


BIAS = Range(
    f"a number in -{MOST_BIAS:g}..{MOST_BIAS:g}",
    lambda x: (-MOST_BIAS <= x) & (x <= MOST_BIAS),
)
BIASES = Range(  # of arrays, in which -inf is usual for tokens that must not be drawn
    f"numbers up to {MOST_BIAS:g}, or -inf", lambda x: x <= MOST_BIAS
)
SEED = Range("an integer in [0, 2^32)", lambda x: (x >= 0) & (x < 2**32), whole=True)
# Of the fields of `Sampling` that are one number. Comparisons with NaN are False.
RANGES = {
    "temperature": Range(
        f"0 (greedy) or {_FLOATS}", lambda x: (x == 0) | ((x >= LEAST) & (x <= MOST))
    ),
    "top_k": Range(
        "an integer >= 0 (0 is off) and below 2^31",
        lambda x: (x >= 0) & (x < 2**31),
        whole=True,
    ),
    "top_p": Range(f"a number in {LEAST:.2g}..1", lambda x: (x >= LEAST) & (x <= 1)),
    "min_p": Range("a number in 0..1", lambda x: (x >= 0) & (x <= 1)),
    "repetition_penalty": Range(_FLOATS, lambda x: (x >= LEAST) & (x <= MOST)),
    "presence_penalty": BIAS,
    "frequency_penalty": BIAS,
}
