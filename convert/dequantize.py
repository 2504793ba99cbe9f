"""Converts weights in few bits to floats: the meaning of each scheme and its scales.

In float64 every product of a stored number and its scales is exact: E2M1 has 2 bits,
E4M3 has 4, int8 less a zero point 9 and a float32 scale 24. One rounding to the wanted
dtype follows. A global scale is never folded into E4M3 scales, most of which would
become subnormal.

Sources: NVIDIA Model Optimizer (`nvfp4_tensor.py`), compressed-tensors (`forward.py`,
`pack_quantized`), transformers (`finegrained_fp8.py`), OCP's E2M1 and E4M3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

# Two to a byte, the first in its low half; the highest bit is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BYTES = np.arange(256)
E2M1_OF_BYTE = np.concatenate([E2M1, -E2M1])[np.stack([BYTES % 16, BYTES // 16], 1)]
# safetensors' name of a stored dtype: numbers in each of its elements
STORED = {"F8_E4M3": 1, "I8": 1, "U8": 2, "I32": 4}
PIECE = 2**21  # numbers that are float64 at once
Part = Literal["weight", "scale", "global_scale", "zero_point", "shape"]


@dataclass(frozen=True)
class Scheme:
    """How the numbers of a matrix [out, in] are stored.

    Attributes:
      name: "fp8", "nvfp4" or "int8".
      stored: dtype of the weight: F8_E4M3; I8; U8, two E2M1 a byte; I32, four int8 plus
        128, the first in the lowest bits.
      block: (rows, columns) that share a scale; 0 means all of them.
      weight, scale, global_scale, zero_point, shape: last words of the tensors' names.
        If empty, there is no such tensor.
      reciprocal: if True, numbers are divided by the global scale, not multiplied.
    """

    name: str
    stored: str
    block: tuple[int, int] = (0, 0)
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str = ""
    zero_point: str = ""
    shape: str = ""
    reciprocal: bool = False

    def endings(self) -> dict[Part, str]:
        """Returns the last word of every tensor's name."""
        named: dict[Part, str] = {
            "weight": self.weight,
            "scale": self.scale,
            "global_scale": self.global_scale,
            "zero_point": self.zero_point,
            "shape": self.shape,
        }
        return {part: word for part, word in named.items() if word}

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Returns [out, in] of a stored matrix."""
        return stored[0], stored[1] * STORED[self.stored]

    def grid(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """Returns the number of scales along each axis; the last block may be shorter
        than the others."""
        sizes = zip(matrix, self.block, strict=True)
        rows, columns = (-(-n // size) if size else 1 for n, size in sizes)
        return rows, columns

    def shapes(self, matrix: tuple[int, int]) -> dict[Part, set[tuple[int, ...]]]:
        """Returns the shapes that each tensor except the weight may have."""
        rows, columns = self.grid(matrix)
        grids: set[tuple[int, ...]] = {(rows, columns)}
        if self.block[0] > 1:  # Model Optimizer keeps the blocks' axes
            grids.add((rows, 1, columns, 1))
        if columns == 1 and not self.block[1]:
            grids.add((rows,))
        if self.block == (0, 0):
            grids.add(())
        return {
            "scale": grids,
            "zero_point": grids,
            "global_scale": {(), (1,)},
            "shape": {(2,)},
        }


def problem(
    scheme: Scheme, arrays: Mapping[Part, np.ndarray]
) -> tuple[Part, str] | None:
    """Returns which of a matrix's scales are invalid, and why, or None.

    A block of zeros may have the scale 0; for a whole tensor that is an error.
    """
    for part in ("scale", "global_scale"):
        if part not in arrays:
            continue
        values = arrays[part].astype(np.float64)
        if not np.isfinite(values).all():
            return part, "a scale is not finite"
        if (values < 0).any():
            return part, f"a scale is negative ({values.min():g})"
        whole = part == "global_scale" or scheme.block == (0, 0)
        if whole and not values.all():
            return part, "the scale of the tensor is 0"
    if "shape" in arrays:
        wanted, got = scheme.matrix(arrays["weight"].shape), arrays["shape"].tolist()
        if got != list(wanted):
            return "shape", f"want {list(wanted)} by the weight's shape, got {got}"
    return None


def dequantize(
    scheme: Scheme, arrays: Mapping[Part, np.ndarray], dtype: np.dtype
) -> np.ndarray:
    """Returns the matrix [out, in] in a float dtype; each number is rounded once.

    Args:
      arrays: in the dtypes and shapes of the scheme.
      dtype: float32 or bfloat16.
    """
    stored = arrays["weight"]
    matrix = scheme.matrix(stored.shape)
    grid = scheme.grid(matrix)
    scale = arrays["scale"].astype(np.float64).reshape(grid)
    zero = np.zeros(grid)
    if "zero_point" in arrays:
        zero = arrays["zero_point"].astype(np.float64).reshape(grid)
    result = np.empty(matrix, dtype)
    for rows in _pieces(matrix):
        numbers = decode(scheme.stored, stored[rows])
        if "zero_point" in arrays:
            numbers -= _spread(zero, scheme.block, matrix, rows)
        numbers *= _spread(scale, scheme.block, matrix, rows)
        if "global_scale" in arrays:
            factor = arrays["global_scale"].astype(np.float64).reshape(())
            # The one quotient is not exact, but further from any tie between two
            # float32 than float64 rounds it: 2**-49 of it, as both have few bits.
            numbers = numbers / factor if scheme.reciprocal else numbers * factor
        result[rows] = rounded(numbers, dtype)
    return result


def _pieces(matrix: tuple[int, int]) -> Iterator[slice]:
    """Returns the rows of a matrix, some at a time."""
    step = max(1, PIECE // max(1, matrix[1]))
    return (slice(i, i + step) for i in range(0, matrix[0], step))


def _spread(
    values: np.ndarray, block: tuple[int, int], matrix: tuple[int, int], rows: slice
) -> np.ndarray:
    """Returns a grid [out blocks, in blocks] at some rows, broadcast to [rows, in]."""
    if block[0]:
        numbers = np.arange(*rows.indices(matrix[0]))
        values = values[numbers // block[0]]
    if block[1]:
        values = np.repeat(values, block[1], axis=1)[:, : matrix[1]]
    return values


def decode(stored: str, elements: np.ndarray) -> np.ndarray:
    """Returns the numbers [n, in] float64 of stored elements [n, packed], without
    scales."""
    match stored:
        case "U8":
            return E2M1_OF_BYTE[elements].reshape(len(elements), -1)
        case "I32":
            little = np.ascontiguousarray(elements).astype("<i4", copy=False)
            return little.view(np.uint8).astype(np.float64) - 128
        case _:
            return elements.astype(np.float64)


def rounded(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounds float64 to the nearest float32 or bfloat16, ties to even.

    ml_dtypes converts to bfloat16 through float32, which would round twice. Rounding to
    odd in between leaves the second rounding as the only one that counts.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = numbers.astype(np.float32)
    if dtype == np.float32:
        return near
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(numbers)  # toward zero
    bits |= near != numbers  # what was cut off: the last bit stands for it
    return near.astype(ml_dtypes.bfloat16).astype(dtype, copy=False)
