"""Reads the tensors of a PyTorch, safetensors or GGUF checkpoint, one at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # the import also makes NumPy and safetensors support bfloat16
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import Index
from stree_jax.convert.tensors.dequantize import Part, Scheme, dequantize, problem
from stree_jax.convert.tensors.gguf_blocks import (
    Kind,
    file_bytes,
    nvfp4_arrays,
    packed_blocks,
    read_blocks,
    read_plain,
)
from stree_jax.convert.tensors.torch_files import PICKLED, from_torch, load_bin
from stree_jax.models.weights.format import Packed
from stree_jax.models.weights.panels.kind import aligned

F8 = "F8_E4M3"
# Bytes per number of each dtype; all others have 2.
BYTES = {F8: 1, "I8": 1, "U8": 1, "float32": 4, "I32": 4, "U32": 4}
BYTES |= {"I64": 8, "float64": 8}
PIECE = 2**24  # numbers of a tensor that are read at a time


@dataclass(frozen=True)
class TensorInfo:
    """File, shape and dtype of a tensor that has not been read.

    Attributes:
      file: the file.
      shape: shape of the tensor.
      dtype: name of the dtype.
      start: offset of the first byte in the file, for GGUF files and for dtypes that
        safetensors cannot return as NumPy arrays.
      kind: storage type in a GGUF file. None for other files.
      factors: factors of the stored numbers in a GGUF file: one, or one for each index
        of the first axis. Empty if there are none.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    kind: Kind | None = None
    factors: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        count = math.prod(self.shape)
        if self.kind is not None:
            return self.kind.nbytes(count)
        return count * BYTES.get(self.dtype, 2)


@dataclass(frozen=True)
class PackedInfo:
    """The stored tensors of one quantized matrix.

    Attributes:
      scheme: the quantization scheme.
      parts: name and info of each tensor.
    """

    scheme: Scheme
    parts: Mapping[Part, tuple[str, TensorInfo]]


@dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint directory or GGUF file.

    Attributes:
      directory: the checkpoint's directory, or the GGUF file.
      tensors: the model's tensors by name. A quantized matrix is one tensor, without
        its scales: its shape is [out, in] and its dtype is the default of `read`.
      opened: the `.bin` file that was read last, with its memory-mapped tensors. At
        most one file is open, because the pages that were read count as memory.
      quantized: how the quantized tensors are stored, by their names in `tensors`.
      shapes_from: name of the file that determines the shapes, for messages.
      unlisted: tensors that an index does not list. Those that the model lacks are
        ignored.
    """

    directory: Path
    tensors: Mapping[str, TensorInfo]
    opened: dict[Path, dict[str, Any]] = field(default_factory=dict)
    quantized: Mapping[str, PackedInfo] = field(default_factory=dict)
    shapes_from: str = "config.json"
    unlisted: frozenset[str] = frozenset()

    def scheme(self, name: str) -> str | None:
        """Returns a tensor's quantization scheme, such as "nvfp4", "int4_128" or
        "q4_k". None if it consists of plain floats."""
        if name in self.quantized:
            return self.quantized[name].scheme.kept_as(self.tensors[name].shape)
        kind = self.tensors[name].kind
        return None if kind is None or kind.plain else kind.name.lower()

    def has_factor(self, name: str) -> bool:
        """True if `packed` returns a factor for each row of the matrix."""
        if name in self.quantized:
            return bool(self.quantized[name].scheme.global_scale)
        kind = self.tensors[name].kind
        return kind is not None and kind.name == "NVFP4"

    def is_quantized(self, name: str) -> bool:
        """True if a tensor is quantized."""
        return self.scheme(name) is not None

    def is_plain(self, name: str) -> bool:
        """True if a slice of a tensor can be read without the rest."""
        return self.tensors[name].kind is None and name not in self.quantized

    def nbytes(self, name: str) -> int:
        """Returns the size of a tensor in its file in bytes, including scales."""
        if name in self.quantized:
            return sum(info.nbytes for _, info in self.quantized[name].parts.values())
        return self.tensors[name].nbytes

    def is_mapped(self, name: str) -> bool:
        """True if `read` may return memory-mapped pages of a file."""
        return self.tensors[name].file.suffix in PICKLED

    def read(self, name: str, dtype: Any = np.float32, index: Index = ()) -> np.ndarray:
        """Reads a tensor as a NumPy array in its own dtype (bfloat16 is from
        ml_dtypes).

        Args:
          name: name of the tensor.
          dtype: float32 or bfloat16, the dtype for a quantized tensor.
          index: slices of the axes to return. A tensor for which `is_plain` is False is
            read whole first.

        Raises:
          CheckpointError: the tensor cannot be read, or a scale is invalid.
        """
        info = self.tensors[name]
        if info.kind is not None:
            where = info.file, name, info.kind, info.start, info.shape
            if info.kind.plain:
                return read_plain(*where)[index]
            if info.factors:
                found = _times(read_blocks(*where, np.float32), info.factors)
                return found.astype(dtype, copy=False)[index]
            return read_blocks(*where, dtype)[index]
        if name not in self.quantized:
            return self._stored(name, info, index)
        arrays = self._arrays(self.quantized[name])
        return dequantize(self.quantized[name].scheme, arrays, np.dtype(dtype))[index]

    def packed(self, name: str) -> Packed:
        """Reads a quantized matrix without dequantizing it.

        The blocks of a GGUF file are one array "blocks" [m, bytes per row]. The arrays
        of other files are those of `Scheme.kept`.

        Args:
          name: name of a tensor whose `scheme` is not None.

        Raises:
          CheckpointError: the tensor cannot be read, or a scale is invalid.
        """
        info, scheme = self.tensors[name], self.scheme(name)
        assert scheme is not None, f"{name} is not packed"
        arrays: dict[str, np.ndarray] = {}
        if info.kind is None:
            stored = self.quantized[name]
            arrays.update(stored.scheme.kept(self._arrays(stored)))
        else:
            where = info.file, name, info.kind, info.start, info.shape
            arrays["blocks"] = packed_blocks(*where)
            if info.kind.name == "NVFP4":
                arrays = nvfp4_arrays(arrays["blocks"], info.shape)
                rows = len(arrays["numbers"])
                factors = np.array(info.factors or (1,), np.float32)
                arrays["factor"] = np.repeat(factors, rows // len(factors))
        return Packed(scheme, info.shape, arrays, reusable=info.kind is not None)

    def _arrays(self, stored: PackedInfo) -> dict[Part, np.ndarray]:
        """Reads the stored tensors of a quantized matrix, and checks its scales."""
        arrays = {part: self._stored(*where) for part, where in stored.parts.items()}
        if (found := problem(stored.scheme, arrays)) is not None:
            part, what = found
            tensor, info = stored.parts[part]
            raise CheckpointError(f"{info.file}: {tensor}: {what}")
        return arrays

    def _stored(self, name: str, info: TensorInfo, index: Index = ()) -> np.ndarray:
        """Reads a tensor or a slice of it as it is in its file."""
        if info.dtype == F8:  # safetensors cannot return it as a NumPy array
            return _read_bytes(name, info).view(ml_dtypes.float8_e4m3fn)
        if info.file.suffix in PICKLED:
            if info.file not in self.opened:
                self.opened.clear()
                self.opened[info.file] = load_bin(info.file)
            return from_torch(self.opened[info.file][name][index])
        from safetensors import SafetensorError

        try:
            return _read_slices(name, info, index)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{info.file}: {name}: {error}") from error


def _times(numbers: np.ndarray, factors: tuple[float, ...]) -> np.ndarray:
    """Multiplies a float32 array by one factor, or by one for each index of its first
    axis."""
    shape = (len(factors), *[1] * (numbers.ndim - 1))
    return numbers * np.array(factors, np.float32).reshape(shape)


def _read_slices(name: str, info: TensorInfo, index: Index) -> np.ndarray:
    """Reads a slice of a tensor from a safetensors file, in pieces.

    The file is reopened for each piece, because the pages that were read count as
    memory while it is open.
    """
    from safetensors import safe_open

    def read(index: Index) -> np.ndarray:
        with safe_open(info.file, framework="np") as opened:
            if not index:
                return opened.get_tensor(name)
            return opened.get_slice(name)[index]

    rows, *rest = index or (slice(None),)
    each = list(at_once(info.shape, rows))
    if len(each) < 2:
        return read(index)
    first = read((each[0], *rest))
    count = each[-1].stop - each[0].start
    whole = aligned((count, *first.shape[1:]), first.dtype)
    whole[: len(first)] = first
    for piece in each[1:]:
        begin = piece.start - each[0].start
        whole[begin : begin + piece.stop - piece.start] = read((piece, *rest))
    return whole


def at_once(shape: tuple[int, ...], rows: slice = slice(None)) -> Iterator[slice]:
    """Yields slices of a tensor's rows, of about `PIECE` numbers each."""
    start, stop, _ = rows.indices(shape[0] if shape else 0)
    step = max(PIECE // max(math.prod(shape[1:]), 1), 1)
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


def _read_bytes(name: str, info: TensorInfo) -> np.ndarray:
    """Reads a tensor of one byte per number, as uint8 in its shape."""
    count = math.prod(info.shape)
    return file_bytes(info.file, name, info.start, count).reshape(info.shape)
