"""Converts quantized weights to floats: the quantization schemes and their scales.

`int4.py` has the schemes of 4-bit integers.

Products of a stored number and its scales are computed in float64, where they are
exact: E2M1 has 2 significant bits, E4M3 has 4, an integer of 8 bits minus a zero point
has 9 and a float32 scale has 24. So is the sum of a product and an offset of 16 bits
near in size. The result is rounded once, to the requested dtype. A
global scale is never multiplied into the E4M3 scales, because most products would be
subnormal.

Sources: NVIDIA Model Optimizer (`nvfp4_tensor.py`), compressed-tensors (`forward.py`,
`pack_quantized`, `mxfp4`), transformers (`finegrained_fp8.py`, `mxfp4.py`), OCP's
E2M1, E4M3 and E8M0.
"""

import math
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
FLOATS = ("float32", "float16", "bfloat16")
BLOCKS, SCALES = "_blocks", "_scales"  # endings of the tensors of gpt-oss
E8M0_NAN = 255  # the other bytes e stand for 2**(e - 127)
PIECE = 2**21  # numbers that are converted to float64 at a time
Part = Literal[
    "weight", "scale", "global_scale", "zero_point", "offset", "shape", "groups"
]


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: how a matrix [out, in] is stored.

    Attributes:
      name: "fp8", "nvfp4", "mxfp4", "int8" or "int4".
      stored: dtype of the stored weight: F8_E4M3; I8; U8 (two E2M1 per byte); or I32
        (four int8 plus 128 each, the first in the lowest bits).
      block: (rows, columns) that share a scale; 0 means all rows or columns.
      weight, scale, global_scale, zero_point, offset, shape: the last components of
        the tensors' names. If empty, the scheme has no such tensor. An offset is added
        to each product of a number and its scale.
      groups: last component of the name of the tensor that has, for each column, the
        index of the group of columns with which it shares a scale. If empty, the
        groups are consecutive columns.
      optional: names of these tensors, such as "groups", that a file may lack.
      reciprocal: True if numbers are divided by the global scale instead of multiplied.
      exponents: True if a scale is a byte of E8M0, which is a power of two.
      signed_scales: True if scales may be negative.
      adds_biases: True if the quantizer may have added a bias of zeros to modules that
        have no bias in the model.
    """

    name: str
    stored: str
    block: tuple[int, int] = (0, 0)
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str = ""
    zero_point: str = ""
    offset: str = ""
    shape: str = ""
    groups: str = ""
    optional: frozenset[Part] = frozenset()
    reciprocal: bool = False
    exponents: bool = False
    signed_scales: bool = False
    adds_biases: bool = False

    def endings(self) -> dict[Part, str]:
        """Returns the last component of each tensor's name."""
        named: dict[Part, str] = {
            "weight": self.weight,
            "scale": self.scale,
            "global_scale": self.global_scale,
            "zero_point": self.zero_point,
            "offset": self.offset,
            "shape": self.shape,
            "groups": self.groups,
        }
        return {part: word for part, word in named.items() if word}

    @property
    def rank(self) -> int:
        """Number of axes of the stored weight."""
        return 2

    @property
    def whole_groups(self) -> bool:
        """True if the last group of columns must not be smaller than the others."""
        return True

    def dtypes(self, part: Part) -> tuple[str, ...]:
        """Returns the allowed dtypes of a tensor except the weight."""
        match part:
            case "scale" if self.exponents:
                return ("U8",)
            case "scale" if self.global_scale:
                return ("F8_E4M3",)
            case "zero_point":
                return ("I8",)
            case "shape":
                return ("I64", "I32")
            case "groups":
                return ("I32", "I64")
        return FLOATS

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape [.., out, in] of a matrix from its stored shape."""
        return stored[0], stored[1] * STORED[self.stored]

    def grid(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of scales along each axis. The last block may be smaller
        than the others."""
        sizes = zip(matrix, self.block, strict=True)
        rows, columns = (-(-n // size) if size else 1 for n, size in sizes)
        return rows, columns

    def shapes(self, matrix: tuple[int, ...]) -> dict[Part, set[tuple[int, ...]]]:
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
            "offset": grids,
            "global_scale": {(), (1,)},
            "shape": {(2,)},
            "groups": {matrix[1:]},
        }

    def kept_as(self, matrix: tuple[int, ...]) -> str:
        """Returns the name of a matrix's layout after `kept`: the name of the scheme,
        and for integers the number of columns of a group."""
        return self.name

    def kept(self, arrays: Mapping[Part, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the exact matrix in a layout that depends on `kept_as` only.

        "numbers" is [out, in] uint8, the bits of each number, and "scale" is [out,
        groups]: float32, or bytes of E8M0 if the scheme has `exponents`. "factor" [out]
        has float32 factors of the rows, if there is a global scale. Leading axes of the
        matrix are joined with its rows. Other schemes than those of four bits are as
        stored.
        """
        if self.stored != "U8":
            return dict(arrays.items())
        plain = self.unpacked(arrays)
        scale = plain["scale"]
        found = {
            "numbers": halves(plain["weight"]),
            "scale": scale if self.exponents else scale.astype(np.float32),
        }
        if "global_scale" in plain:
            factor = plain["global_scale"].astype(np.float64).reshape(1)
            factor = 1 / factor if self.reciprocal else factor
            found["factor"] = np.repeat(factor.astype(np.float32), len(scale))
        return found

    def unpacked(self, arrays: Mapping[Part, np.ndarray]) -> Mapping[Part, np.ndarray]:
        """Returns the arrays with the weight by rows and the scales and zero points in
        the shape of `grid`."""
        return arrays

    def numbers(self, elements: np.ndarray) -> np.ndarray:
        """Decodes some rows of the unpacked weight to float64, without scales."""
        return decode(self.stored, elements)

    def problem(self, arrays: Mapping[Part, np.ndarray]) -> tuple[Part, str] | None:
        """Returns which tensor is invalid for a reason of this scheme alone, and
        why."""
        return None


@dataclass(frozen=True)
class Blocks(Scheme):
    """MXFP4 as in gpt-oss: a weight [.., out, in] is stored as X_blocks [.., out, in /
    32, 16] and X_scales [.., out, in / 32], with three axes for all experts of a
    layer."""

    @property
    def rank(self) -> int:
        return 4

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return *stored[:-2], stored[-2] * stored[-1] * 2

    def shapes(self, matrix: tuple[int, ...]) -> dict[Part, set[tuple[int, ...]]]:
        return {"scale": {(*matrix[:-1], matrix[-1] // self.block[1])}}

    def unpacked(self, arrays: Mapping[Part, np.ndarray]) -> Mapping[Part, np.ndarray]:
        weight, scale = arrays["weight"], arrays["scale"]
        rows = math.prod(scale.shape[:-1])
        return {"weight": weight.reshape(rows, -1), "scale": scale.reshape(rows, -1)}


def problem(
    scheme: Scheme, arrays: Mapping[Part, np.ndarray]
) -> tuple[Part, str] | None:
    """Finds the first invalid tensor of a quantized matrix. Returns its name in
    `Scheme.endings`, such as "scale", and the reason; None if all are valid.

    The scale of a block may be 0. The scale of the whole matrix must not be 0.
    """
    for part in ("scale", "global_scale"):
        if part not in arrays:
            continue
        values = _values(scheme, part, arrays[part])
        if not np.isfinite(values).all():
            return part, "a scale is not finite"
        if (values < 0).any() and not scheme.signed_scales:
            return part, f"a scale is negative ({values.min():g})"
        whole = part == "global_scale" or scheme.block == (0, 0)
        if whole and not values.all():
            return part, "the scale of the tensor is 0"
    if "shape" in arrays:
        wanted, got = scheme.matrix(arrays["weight"].shape), arrays["shape"].tolist()
        if got != list(wanted):
            return "shape", f"want {list(wanted)} by the weight's shape, got {got}"
    return scheme.problem(arrays)


def dequantize(
    scheme: Scheme, arrays: Mapping[Part, np.ndarray], dtype: np.dtype
) -> np.ndarray:
    """Computes the matrix [.., out, in] in a float dtype. Each number is rounded once.

    Args:
      scheme: the quantization scheme.
      arrays: the stored arrays, in the dtypes and shapes of the scheme.
      dtype: float32 or bfloat16.
    """
    shape = scheme.matrix(arrays["weight"].shape)
    matrix = math.prod(shape[:-1]), shape[-1]
    arrays = scheme.unpacked(arrays)
    stored, columns = arrays["weight"], arrays.get("groups")
    grid = scheme.grid(matrix)
    scale = _values(scheme, "scale", arrays["scale"]).reshape(grid)
    zero = np.zeros(grid)
    if "zero_point" in arrays:
        zero = arrays["zero_point"].astype(np.float64).reshape(grid)
    result = np.empty(matrix, dtype)
    for rows in _pieces(matrix):
        numbers = scheme.numbers(stored[rows])
        if "zero_point" in arrays:
            numbers -= _spread(zero, scheme.block, matrix, rows, columns)
        numbers *= _spread(scale, scheme.block, matrix, rows, columns)
        if "offset" in arrays:
            offset = arrays["offset"].astype(np.float64).reshape(grid)
            numbers += _spread(offset, scheme.block, matrix, rows)
        if "global_scale" in arrays:
            factor = arrays["global_scale"].astype(np.float64).reshape(())
            # The quotient is not exact. But since both operands have few bits, it is at
            # least 2**-49 (relative) away from any tie between two float32, which is
            # more than the rounding error of float64.
            numbers = numbers / factor if scheme.reciprocal else numbers * factor
        result[rows] = rounded(numbers, dtype)
    return result.reshape(shape)


def _values(scheme: Scheme, part: Part, array: np.ndarray) -> np.ndarray:
    """Decodes scales to float64."""
    if part == "scale" and scheme.exponents:
        exponents = array.astype(np.int32) - 127
        return np.where(array == E8M0_NAN, np.nan, np.ldexp(1.0, exponents))
    return array.astype(np.float64)


def _pieces(matrix: tuple[int, int]) -> Iterator[slice]:
    """Yields slices of a matrix's rows, about `PIECE` numbers each."""
    step = max(1, PIECE // max(1, matrix[1]))
    return (slice(i, i + step) for i in range(0, matrix[0], step))


def _spread(
    values: np.ndarray,
    block: tuple[int, int],
    matrix: tuple[int, int],
    rows: slice,
    columns: np.ndarray | None = None,
) -> np.ndarray:
    """Repeats the numbers of a grid for each element of some rows of the matrix.

    Args:
      values: [out blocks, in blocks]. One number for each block of the matrix.
      block: rows and columns of a block; 0 means all.
      matrix: shape [out, in] of the whole matrix.
      rows: the rows of the matrix.
      columns: [in]. Index of the block of each column, if blocks are not consecutive
        columns.

    Returns:
      [rows, in].
    """
    if block[0]:
        numbers = np.arange(*rows.indices(matrix[0]))
        values = values[numbers // block[0]]
    if columns is not None:
        return values[:, columns]
    if block[1]:
        values = np.repeat(values, block[1], axis=1)[:, : matrix[1]]
    return values


def halves(elements: np.ndarray) -> np.ndarray:
    """Returns the low half of each byte [n, bytes], then its high half, as [n, numbers]
    uint8."""
    return np.stack([elements & 15, elements >> 4], -1).reshape(len(elements), -1)


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
