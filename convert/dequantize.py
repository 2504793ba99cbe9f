"""Converts quantized weights to floats: the quantization schemes and their scales.

Products of a stored number and its scales are computed in float64, where they are
exact: E2M1 has 2 significant bits, E4M3 has 4, int8 minus a zero point has 9 and a
float32 scale has 24. The result is rounded once, to the requested dtype. A global scale
is never multiplied into the E4M3 scales, because most products would be subnormal.

Sources: NVIDIA Model Optimizer (`nvfp4_tensor.py`), compressed-tensors (`forward.py`,
`pack_quantized`), transformers (`finegrained_fp8.py`), OCP's E2M1 and E4M3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

# E2M1: two numbers per byte, the first in the low half. The highest bit is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BYTES = np.arange(256)
E2M1_OF_BYTE = np.concatenate([E2M1, -E2M1])[np.stack([BYTES % 16, BYTES // 16], 1)]
# Numbers per element of a stored dtype, by its name in safetensors.
STORED = {"F8_E4M3": 1, "I8": 1, "U8": 2, "I32": 4}
PIECE = 2**21  # numbers that are converted to float64 at a time
Part = Literal["weight", "scale", "global_scale", "zero_point", "shape"]


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: how a matrix [out, in] is stored.

    Attributes:
      name: "fp8", "nvfp4" or "int8".
      stored: dtype of the stored weight: F8_E4M3; I8; U8 (two E2M1 per byte); or I32
        (four int8 plus 128 each, the first in the lowest bits).
      block: (rows, columns) that share a scale; 0 means all rows or columns.
      weight, scale, global_scale, zero_point, shape: the last components of the
        tensors' names. If empty, the scheme has no such tensor.
      reciprocal: True if numbers are divided by the global scale instead of multiplied.
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
        """Returns the last component of each tensor's name."""
        named: dict[Part, str] = {
            "weight": self.weight,
            "scale": self.scale,
            "global_scale": self.global_scale,
            "zero_point": self.zero_point,
            "shape": self.shape,
        }
        return {part: word for part, word in named.items() if word}

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape [out, in] of a matrix from its stored shape."""
        return stored[0], stored[1] * STORED[self.stored]

    def grid(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """Returns the number of scales along each axis. The last block may be smaller
        than the others."""
        sizes = zip(matrix, self.block, strict=True)
        rows, columns = (-(-n // size) if size else 1 for n, size in sizes)
        return rows, columns

    def shapes(self, matrix: tuple[int, int]) -> dict[Part, set[tuple[int, ...]]]:
        """Returns the allowed shapes of each tensor except the weight."""
        rows, columns = self.grid(matrix)
        grids: set[tuple[int, ...]] = {(rows, columns)}
        if self.block[0] > 1:  # Model Optimizer keeps axes of size 1 for the blocks
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
    """Returns which of a matrix's tensors is invalid, and why. None if all are valid.

    A block of zeros may have scale 0; for a whole tensor that is an error.
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
    """Computes the matrix [out, in] in a float dtype. Each number is rounded once.

    Args:
      scheme: the quantization scheme.
      arrays: the stored arrays, in the dtypes and shapes of the scheme.
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
            # The quotient is not exact. But since both operands have few bits, it is at
            # least 2**-49 (relative) away from any tie between two float32, which is
            # more than the rounding error of float64.
            numbers = numbers / factor if scheme.reciprocal else numbers * factor
        result[rows] = rounded(numbers, dtype)
    return result


def _pieces(matrix: tuple[int, int]) -> Iterator[slice]:
    """Yields slices of a matrix's rows, about `PIECE` numbers each."""
    step = max(1, PIECE // max(1, matrix[1]))
    return (slice(i, i + step) for i in range(0, matrix[0], step))


def _spread(
    values: np.ndarray, block: tuple[int, int], matrix: tuple[int, int], rows: slice
) -> np.ndarray:
    """Broadcasts a grid [out blocks, in blocks] to some rows of the matrix,
    [rows, in]."""
    if block[0]:
        numbers = np.arange(*rows.indices(matrix[0]))
        values = values[numbers // block[0]]
    if block[1]:
        values = np.repeat(values, block[1], axis=1)[:, : matrix[1]]
    return values


def decode(stored: str, elements: np.ndarray) -> np.ndarray:
    """Decodes stored elements [n, packed] to numbers [n, in] float64, without
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

    ml_dtypes converts to bfloat16 through float32, which would round twice. The
    intermediate float32 is therefore rounded to odd, which makes the final result the
    same as with a single rounding.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = numbers.astype(np.float32)
    if dtype == np.float32:
        return near
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(numbers)  # toward zero
    bits |= near != numbers  # round to odd: the last bit is set if bits were cut off
    return near.astype(ml_dtypes.bfloat16).astype(dtype, copy=False)
