"""float32 and bfloat16 weights: the format."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stree_jax.models.weights.format import Format


class PlainFormat(Format):
    """The format whose weights are plain arrays of one float dtype."""

    plain = True
    can_be_saved = True

    def store(self, matrix: Any, columns: int | None = None) -> Any:
        return matrix.astype(self.dtype, copy=False)

    def source_dtype(self, stored: str, shape: Sequence[int]) -> np.dtype:
        return self.dtype

    def nbytes(self, shape: tuple[int, ...], path: tuple[str, ...] = ()) -> int:
        return math.prod(shape) * self.dtype.itemsize


def plain_format(dtype: Any) -> PlainFormat:
    """Returns the format for plain arrays of this dtype."""
    found = np.dtype(dtype)
    return PlainFormat(found.name, found)
