"""int8 weights with scales: the format."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stree_jax.models.weights.format import BFLOAT16, Format

GROUP = 128  # columns that share a scale; measured in bench/records/int8-weights.json


@dataclass(frozen=True)
class Int8Format(Format):
    """The format with matrices in int8 and other parameters in bfloat16.

    Attributes:
      group: columns that share a scale, or the nearest fitting number (`group_of`). If
        None, each row has one scale.
    """

    name: str = "int8"
    dtype: np.dtype = BFLOAT16
    group: int | None = GROUP

    def store(self, matrix: Any, columns: int | None = None) -> Any:
        from stree_jax.models.weights.int8 import stored_int8

        whole = matrix.shape[-1] if columns is None else columns
        size = None if self.group is None else group_of(whole, self.group)
        return stored_int8(matrix, size)


INT8 = Int8Format()


def group_of(columns: int, group: int = GROUP) -> int | None:
    """Returns the largest divisor of `columns` between group / 2 and `group`.

    Returns None if there is no such divisor; then the whole row has one scale.
    """
    sizes = range(min(group, columns), group // 2 - 1, -1)
    return next((n for n in sizes if n and columns % n == 0), None)
