"""Matrices of 4-bit integers with scales by groups of columns: GPTQ, AWQ and
compressed-tensors.

All of them store 8 numbers q of 0..15 in an int32, and a number is scale * (q - zero).
They differ in the axis along which numbers share an int32, in their order within it and
in the zero points. `Int4.unpacked` brings them to one layout.

Sources: AutoGPTQ and GPTQModel (`qlinear`), AutoAWQ (`packing_utils.py`),
compressed-tensors (`pack_quantized`), vLLM (`gptq.py`, `awq.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stree_jax.convert.tensors.dequantize import Part, Scheme, halves

PER_WORD = 8  # numbers in an int32
MIDDLE = 8  # zero point of a symmetric matrix
# AWQ: the column of each number of an int32, the lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NO_GROUP = -1  # of every column in compressed-tensors: the groups are in order
KEPT_GROUPS = (128, 64, 32)  # columns that share a scale in the result of `Int4.kept`


@dataclass(frozen=True)
class Int4(Scheme):
    """The quantization scheme of 4-bit integers. `block` is (1, number of columns that
    share a scale).

    Attributes:
      layout: name of the quantizer whose order of numbers in an int32 is used.
      symmetric: True if all zero points are 8.
      less_one: True if the file stores each zero point minus 1 (GPTQ's first format).
    """

    layout: Literal["gptq", "awq", "compressed"] = "gptq"
    symmetric: bool = False
    less_one: bool = False

    @property
    def whole_groups(self) -> bool:
        return self.layout == "compressed"

    def dtypes(self, part: Part) -> tuple[str, ...]:
        return ("I32",) if part == "zero_point" else super().dtypes(part)

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        first, second = stored
        match self.layout:
            case "gptq":
                return second, first * PER_WORD
            case "awq":
                return second * PER_WORD, first
        return first, second * PER_WORD

    def shapes(self, matrix: tuple[int, ...]) -> dict[Part, set[tuple[int, ...]]]:
        rows, groups = self.grid(matrix)
        words = -(-rows // PER_WORD)
        found = super().shapes(matrix)
        if self.layout != "compressed":  # transposed
            return found | {"scale": {(groups, rows)}, "zero_point": {(groups, words)}}
        return found | {"zero_point": {(words, groups)}}

    def kept_as(self, matrix: tuple[int, ...]) -> str:
        size = math.gcd(self.block[1] or matrix[1], matrix[1])
        fits = (n for n in KEPT_GROUPS if size % n == 0)
        columns = next(fits, None)
        return self.name if columns is None else f"{self.name}_{columns}"

    def kept(self, arrays: Mapping[Part, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the matrix without dequantizing it, in the layout that `Scheme.kept`
        describes. Columns are reordered so that each group's columns are consecutive.

        "zero" [out, groups] float32 has the zero points. "columns" [in] int32 is the
        original place of each column, if their order has changed.
        """
        plain = self.unpacked(arrays)
        numbers = plain["weight"]
        grid = {"scale": plain["scale"], "zero": plain["zero_point"]}
        columns = numbers.shape[1]
        size = self.block[1] or columns
        kept = int(self.kept_as(numbers.shape).rpartition("_")[2])
        groups = np.arange(0, columns, kept) // size  # of the scheme, by those we keep
        found = {n: values[:, groups].astype(np.float32) for n, values in grid.items()}
        if "groups" in plain:
            order = np.argsort(plain["groups"], kind="stable")
            return {
                "numbers": np.take(numbers, order, axis=1),
                **found,
                "columns": order.astype(np.int32),
            }
        return {"numbers": numbers, **found}

    def unpacked(self, arrays: Mapping[Part, np.ndarray]) -> Mapping[Part, np.ndarray]:
        weight, scale = arrays["weight"], arrays["scale"]
        match self.layout:
            case "gptq":
                numbers, scale = nibbles(weight.T), scale.T
            case "awq":
                numbers, scale = _awq(weight), scale.T
            case "compressed":
                numbers = nibbles(weight)
        scale = scale.reshape(len(numbers), -1)
        found: dict[Part, np.ndarray] = {
            "weight": np.ascontiguousarray(numbers),
            "scale": scale,
            "zero_point": self._zeros(arrays, scale.shape),
        }
        groups = arrays.get("groups")
        if groups is not None and not _in_order(groups, self.block[1]):
            found["groups"] = groups
        return found

    def numbers(self, elements: np.ndarray) -> np.ndarray:
        return elements.astype(np.float64)

    def problem(self, arrays: Mapping[Part, np.ndarray]) -> tuple[Part, str] | None:
        if (groups := arrays.get("groups")) is None or (groups == NO_GROUP).all():
            return None
        columns, size = len(groups), self.block[1] or len(groups)
        count = -(-columns // size)
        if groups.min() < 0 or groups.max() >= count:
            odd = groups.min() if groups.min() < 0 else groups.max()
            return "groups", f"group {odd} of a column is not in 0..{count - 1}"
        counts = np.bincount(groups, minlength=count)
        wanted = np.diff([*range(0, columns, size), columns])
        if (counts != wanted).any():
            i = int(np.argmax(counts != wanted))
            return "groups", f"group {i} has {counts[i]} columns, want {wanted[i]}"
        return None

    def _zeros(
        self, arrays: Mapping[Part, np.ndarray], grid: tuple[int, ...]
    ) -> np.ndarray:
        """Returns the zero points in the shape `grid`."""
        if "zero_point" not in arrays:
            return np.full(grid, MIDDLE, np.uint8)
        words, rows = arrays["zero_point"], grid[0]
        match self.layout:
            case "awq":
                return _awq(words)[:rows]
            case "compressed":
                return nibbles(words.T).T[:rows]
        stored = nibbles(words).T[:rows]
        # Some files of the second format are declared as the first. A symmetric file
        # shows which one it is: it has the same zero point everywhere.
        if self.symmetric and (stored == stored[0, 0]).all():
            if stored[0, 0] in (MIDDLE - 1, MIDDLE):
                return np.full(grid, MIDDLE, np.uint8)
        return (stored + 1) & 15 if self.less_one else stored


def nibbles(words: np.ndarray) -> np.ndarray:
    """Unpacks int32 [n, words] to [n, 8 words] uint8 of 0..15, the lowest bits
    first."""
    little = np.ascontiguousarray(words).astype("<i4", copy=False)
    return halves(little.view(np.uint8))


def _awq(words: np.ndarray) -> np.ndarray:
    """Unpacks int32 [n, words] of AWQ to [8 words, n] uint8."""
    little = np.ascontiguousarray(words.T).astype("<i4", copy=False)
    each = little.view(np.uint8).reshape(*little.shape, 4)
    result = np.empty((PER_WORD * len(each), each.shape[1]), np.uint8)
    for i in range(4):
        first, second = AWQ_ORDER[2 * i : 2 * i + 2]
        result[first::PER_WORD] = each[..., i] & 15
        result[second::PER_WORD] = each[..., i] >> 4
    return result


def _in_order(groups: np.ndarray, size: int) -> bool:
    """True if the groups are consecutive columns: the first `size` columns are group 0,
    the next ones group 1, and so on. The index `NO_GROUP` for every column means this,
    too."""
    if (groups == NO_GROUP).all():
        return True
    return bool((groups == np.arange(len(groups)) // (size or len(groups))).all())
