"""Reads tensors of a GGUF file as NumPy arrays: plain floats, or quantized blocks.

The `gguf` package decodes the blocks; plain floats need no package. The sizes of blocks
are from ggml.h.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stree_jax.convert.errors import CheckpointError

PIECE = 2**21  # numbers that are decoded to float32 at a time
PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Kind:
    """A storage type of ggml.

    Attributes:
      number: ggml's number of the type.
      name: ggml's name of the type.
      block: numbers per block.
      size: bytes per block.
    """

    number: int
    name: str
    block: int
    size: int

    @property
    def plain(self) -> bool:
        return self.name in PLAIN

    def nbytes(self, numbers: int) -> int:
        return numbers // self.block * self.size


# Storage types by ggml's number, without integers and types that ggml uses only for
# activations.
KINDS = {
    kind.number: kind
    for kind in (
        Kind(0, "F32", 1, 4),
        Kind(1, "F16", 1, 2),
        Kind(2, "Q4_0", 32, 18),
        Kind(3, "Q4_1", 32, 20),
        Kind(6, "Q5_0", 32, 22),
        Kind(7, "Q5_1", 32, 24),
        Kind(8, "Q8_0", 32, 34),
        Kind(10, "Q2_K", 256, 84),
        Kind(11, "Q3_K", 256, 110),
        Kind(12, "Q4_K", 256, 144),
        Kind(13, "Q5_K", 256, 176),
        Kind(14, "Q6_K", 256, 210),
        Kind(16, "IQ2_XXS", 256, 66),
        Kind(17, "IQ2_XS", 256, 74),
        Kind(18, "IQ3_XXS", 256, 98),
        Kind(19, "IQ1_S", 256, 50),
        Kind(20, "IQ4_NL", 32, 18),
        Kind(21, "IQ3_S", 256, 110),
        Kind(22, "IQ2_S", 256, 82),
        Kind(23, "IQ4_XS", 256, 136),
        Kind(29, "IQ1_M", 256, 56),
        Kind(30, "BF16", 1, 2),
        Kind(34, "TQ1_0", 256, 54),
        Kind(35, "TQ2_0", 256, 66),
        Kind(39, "MXFP4", 32, 17),
    )
}


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading axes of size 1, which GGUF files do not store."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return shape[first:]


def read_plain(file: Path, name: str, kind: Kind, start: int, shape: Any) -> np.ndarray:
    """Reads a tensor of plain floats in its own dtype."""
    count = math.prod(shape)
    return (
        _bytes(file, name, start, kind.nbytes(count))
        .view(PLAIN[kind.name])
        .reshape(shape)
    )


def packed_blocks(
    file: Path, name: str, kind: Kind, start: int, shape: Any
) -> np.ndarray:
    """Reads the blocks of a tensor without decoding: [rows, bytes per row] uint8."""
    rows, row_bytes = math.prod(shape[:-1]), kind.nbytes(shape[-1])
    return _bytes(file, name, start, rows * row_bytes).reshape(rows, row_bytes)


def read_blocks(
    file: Path, name: str, kind: Kind, start: int, shape: Any, dtype: Any
) -> np.ndarray:
    """Decodes a tensor of blocks to float32 and rounds it to `dtype`, some rows at a
    time.

    Raises:
      CheckpointError: the file is too short, or the `gguf` package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{file}: {kind.name} weights are read by gguf; "
            "pip install 'stree-jax[gguf]'"
        ) from error
    numbered = gguf.GGMLQuantizationType(kind.number)
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    row_bytes = kind.nbytes(columns)
    result = np.empty((rows, columns), dtype)
    step = max(1, PIECE // columns)
    for i in range(0, rows, step):
        piece = result[i : i + step]
        data = _bytes(file, name, start + i * row_bytes, len(piece) * row_bytes)
        with np.errstate(all="ignore"):  # a damaged file may have any scales
            numbers = gguf.quants.dequantize(data.reshape(len(piece), -1), numbered)
            piece[...] = numbers.astype(dtype, copy=False)
    return result.reshape(shape)


def _bytes(file: Path, name: str, start: int, count: int) -> np.ndarray:
    try:
        read = np.fromfile(file, np.uint8, count, offset=start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {name}: {error}") from error
    if read.size != count:
        raise CheckpointError(f"{file}: {name}: the file is truncated")
    return read
