"""Reads tensors of a GGUF file as NumPy arrays: plain floats, or quantized blocks.

The `gguf` package decodes the blocks, except those of `DECODERS`; plain floats need no
package. The sizes of blocks are from ggml.h.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.models.weights.panels.kind import aligned

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
        Kind(40, "NVFP4", 64, 36),
        Kind(41, "Q1_0", 128, 18),
        Kind(42, "Q2_0", 64, 18),
    )
}
# Names of ggml's other types: integers, types of activations, and removed types.
OTHER_KINDS = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """Decodes a float16 scale and a bit per weight, lowest first: 0 is -1, 1 is +1."""
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return scale * (2 * bits.astype(np.float32) - 1)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    """Decodes a float16 scale and two bits per weight, lowest first: 0 to 3 are -1 to
    2."""
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    codes = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    return scale * (codes.reshape(len(blocks), -1).astype(np.float32) - 1)


# Decoders of blocks [n, bytes] to float32 [n, numbers], for types that the package
# gguf 0.19 cannot decode.
DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q1_0": _q1_0, "Q2_0": _q2_0}


def nvfp4_arrays(rows: np.ndarray, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Converts rows of NVFP4 blocks to the layout that `Scheme.kept` describes.

    A block has four unsigned E4M3 scales, each for 16 weights, then the weights as E2M1
    in 8 bytes for each scale: the first eight in the low halves, the others in the high
    halves.

    Args:
      rows: [m, bytes per row] uint8.
      shape: [.., k], the shape of the matrix, whose last axis is a multiple of 64.
    """
    blocks = rows.reshape(-1, 36)
    pairs = blocks[:, 4:].reshape(-1, 4, 8)
    numbers = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, shape[-1])
    bits = np.where(blocks[:, :4] == 127, 0, blocks[:, :4])  # NaN is 0 in ggml
    scale = (bits & 127).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return {"numbers": numbers, "scale": scale.reshape(len(numbers), -1)}


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading axes of size 1, which GGUF files do not store."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return shape[first:]


def read_plain(file: Path, name: str, kind: Kind, start: int, shape: Any) -> np.ndarray:
    """Reads a tensor of plain floats in its own dtype."""
    count = math.prod(shape)
    return (
        file_bytes(file, name, start, kind.nbytes(count))
        .view(PLAIN[kind.name])
        .reshape(shape)
    )


def packed_blocks(
    file: Path, name: str, kind: Kind, start: int, shape: Any
) -> np.ndarray:
    """Reads the blocks of a tensor without decoding: [rows, bytes per row] uint8."""
    rows, row_bytes = math.prod(shape[:-1]), kind.nbytes(shape[-1])
    return file_bytes(file, name, start, rows * row_bytes).reshape(rows, row_bytes)


def read_blocks(
    file: Path, name: str, kind: Kind, start: int, shape: Any, dtype: Any
) -> np.ndarray:
    """Decodes a tensor of blocks to float32 and rounds it to `dtype`, some rows at a
    time.

    Raises:
      CheckpointError: the file is too short, or the `gguf` package is missing.
    """
    decode = _decoder(file, kind)
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    row_bytes = kind.nbytes(columns)
    result = np.empty((rows, columns), dtype)
    step = max(1, PIECE // columns)
    for i in range(0, rows, step):
        piece = result[i : i + step]
        data = file_bytes(file, name, start + i * row_bytes, len(piece) * row_bytes)
        with np.errstate(all="ignore"):  # a damaged file may have any scales
            numbers = decode(data.reshape(-1, kind.size)).reshape(piece.shape)
            piece[...] = numbers.astype(dtype, copy=False)
    return result.reshape(shape)


def _decoder(file: Path, kind: Kind) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that decodes blocks [n, bytes] to [n, numbers] float32."""
    if kind.name in DECODERS:
        return DECODERS[kind.name]
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{file}: decoding {kind.name} weights needs gguf; pip install gguf"
        ) from error
    numbered = gguf.GGMLQuantizationType(kind.number)
    return lambda blocks: gguf.quants.dequantize(blocks, numbered)


def file_bytes(file: Path, name: str, start: int, count: int) -> np.ndarray:
    """Reads bytes of a file into new, aligned memory.

    Args:
      file: the file.
      name: name of the tensor, for messages.
      start: offset of the first byte.
      count: number of bytes.

    Raises:
      CheckpointError: the file cannot be read, or is too short.
    """
    found = aligned((count,), np.dtype(np.uint8))
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(start)
            read = 0
            while read < count and (more := opened.readinto(found[read:].data)):
                read += more
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {name}: {error}") from error
    if read < count:
        raise CheckpointError(f"{file}: {name}: the file is truncated")
    return found
