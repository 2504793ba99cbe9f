"""Reads MLX's affine quantization, and detects MLX's layout of unquantized tensors.

A number is scale * q + bias, with a scale and a bias for each group of columns. A
uint32 holds 8 numbers of 4 bits or 4 of 8 bits, the first in the lowest bits.

Sources: MLX 0.32 (`mx.quantize`), mlx-lm 0.32 (`utils.py`, and `sanitize` of its
models).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.dequantize import FLOATS, Part, Scheme, halves
from stree_jax.convert.tensors.int4 import KEPT_GROUPS
from stree_jax.convert.tensors.stored_tensors import Tensors

GROUPS = (32, 64, 128)  # columns of a group


@dataclass(frozen=True)
class Affine(Scheme):
    """Integers of 4 or 8 bits with a scale and an offset; `kept` has the zero point
    -offset / scale instead.

    Attributes:
      bits: 4 or 8.
    """

    bits: int = 4

    def dtypes(self, part: Part) -> tuple[str, ...]:
        return FLOATS

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0], stored[1] * (32 // self.bits)

    def kept_as(self, matrix: tuple[int, ...]) -> str:
        fits = self.bits == 4 and self.block[1] in KEPT_GROUPS
        return f"int4_{self.block[1]}" if fits else self.name

    def kept(self, arrays: Mapping[Part, np.ndarray]) -> dict[str, np.ndarray]:
        plain = self.unpacked(arrays)
        scale, offset = (plain[p].astype(np.float64) for p in ("scale", "offset"))
        found = {"scale": scale, "zero": -offset / scale}
        floats = {name: values.astype(np.float32) for name, values in found.items()}
        return {"numbers": plain["weight"], **floats}

    def unpacked(self, arrays: Mapping[Part, np.ndarray]) -> Mapping[Part, np.ndarray]:
        little = np.ascontiguousarray(arrays["weight"]).astype("<u4", copy=False)
        numbers = little.view(np.uint8)
        weight = halves(numbers) if self.bits == 4 else numbers
        return {**arrays, "weight": weight}

    def numbers(self, elements: np.ndarray) -> np.ndarray:
        return elements.astype(np.float64)

    def problem(self, arrays: Mapping[Part, np.ndarray]) -> tuple[Part, str] | None:
        if not arrays["scale"].all():
            return "scale", "a scale is 0"
        if not np.isfinite(arrays["offset"].astype(np.float32)).all():
            return "offset", "a bias is not finite"
        return None


def affine(bits: int, columns: int) -> Affine:
    """Returns the scheme for groups of `columns` columns."""
    return Affine(
        f"int{bits}",
        "U32",
        (1, columns),
        scale="scales",
        offset="biases",
        signed_scales=True,
        bits=bits,
    )


def check_layout(source: Tensors) -> None:
    """Raises CheckpointError for layouts of mlx-lm that differ from transformers'.

    mlx-lm transposes convolutions and stacks experts; it also changes norms of some of
    these models, which shapes would not show.
    """
    for name, info in source.tensors.items():
        transposed = name.endswith("conv1d.weight") or name.endswith("conv.weight")
        transposed &= len(info.shape) == 3 and info.shape[1] > 1 == info.shape[2]
        if transposed or ".switch_mlp." in name:
            raise CheckpointError(
                f"{info.file}: {name}: in MLX's own layout, which is supported for "
                "models of attention and MLPs only; load the model that it was made of"
            )
