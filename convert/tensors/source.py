"""Reads the tensors of a PyTorch, safetensors or GGUF checkpoint, one at a time."""

import json
import math
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes  # the import also makes NumPy and safetensors support bfloat16
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import Index, check_fetched, read_text
from stree_jax.convert.tensors.dequantize import Part, Scheme, dequantize, problem
from stree_jax.convert.tensors.gguf_blocks import (
    Kind,
    file_bytes,
    nvfp4_arrays,
    packed_blocks,
    read_blocks,
    read_plain,
)
from stree_jax.models.weights.panels.kind import aligned
from stree_jax.models.weights.weight import BFLOAT16, FLOAT32, Packed

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
}
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # ending of the file that maps tensors to shards
PICKLED = (".bin", ".pt")
F8 = "F8_E4M3"
# Bytes per number of each dtype; all others have 2.
BYTES = {F8: 1, "I8": 1, "U8": 1, "float32": 4, "I32": 4, "U32": 4}
BYTES |= {"I64": 8, "float64": 8}
PIECE = 2**24  # numbers of a tensor that are read at a time
ADAPTER = "adapter_config.json"
MAX_NAME = 255  # characters of a file's name
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(?:safetensors|bin)$")
# Message for params.json, and for tensors with the names of consolidated.*.
OWN_FORMAT = (
    "the formats of Mistral and Meta are not supported; want config.json and "
    "model.safetensors (or its shards and index) as transformers has them"
)


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
class Source:
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
                self.opened[info.file] = _load_bin(info.file)
            return _from_torch(self.opened[info.file][name][index])
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


def is_file(path: Path) -> bool:
    """True if the path is a regular file, False if it does not exist.

    Raises:
      CheckpointError: it is something else, such as a pipe, whose reading may never
        end.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      CheckpointError: the file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: want a JSON object, got {type(value).__name__}")
    return value


def weight_files(directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """Returns the files with the weights, and their index's map of tensors to shards
    (empty for a single file)."""
    found = weights_among(file_names(directory))
    if found is None:
        names = " or ".join(WEIGHT_FILES)
        shards = [name for name in file_names(directory) if _SHARD.search(name)]
        also = f" ({shards[0]} is a shard, without the index)" if shards else ""
        raise CheckpointError(
            f"{directory}: no weights; want {names}, or their index{also}"
        )
    if found.endswith(INDEX):
        return _shards(directory / found)
    return [directory / found], {}


def file_names(directory: Path) -> list[str]:
    """Returns the sorted names of the regular files in a directory."""
    try:
        return sorted(file.name for file in directory.iterdir() if file.is_file())
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error})") from error


def weights_among(names: Collection[str]) -> str | None:
    """Chooses which of a directory's files to read the weights from.

    That is a file of all weights, an index of shards, or the only safetensors file.
    Returns None if all of these are absent.
    """
    for name in WEIGHT_FILES:
        for choice in (name, f"{name}{INDEX}"):
            if choice in names:
                return choice
    alone = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    return alone[0] if len(alone) == 1 else None


def _shards(index: Path) -> tuple[list[Path], dict[str, Any]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: want a non-empty object")
    shards = []
    for name in sorted(set(map(str, weight_map.values()))):
        odd = Path(name).name != name or len(name) > MAX_NAME
        if odd or not name.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{index}: weight_map: {name!r} is not a weight file next to the index"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: weight_map: shard {name!r} is missing")
        shards.append(index.parent / name)
    return shards, weight_map


def source_dtype(source: Source) -> np.dtype:
    """Returns the default dtype for loading a checkpoint.

    It is bfloat16 if the matrices are bfloat16 or any weight is quantized, and float32
    otherwise. float16 becomes float32, because its range is too small for the residual
    stream.
    """
    if any(map(source.is_quantized, source.tensors)):
        return BFLOAT16
    matrices = {info.dtype for info in source.tensors.values() if len(info.shape) == 2}
    return BFLOAT16 if matrices == {"bfloat16"} else FLOAT32


def open_source(directory: Path) -> Source:
    """Lists the tensors of a checkpoint directory. Reads only headers.

    Raises:
      CheckpointError: it is not a checkpoint, or incomplete or damaged.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: {_without_config(directory)}")
    if is_file(directory / ADAPTER):
        raise CheckpointError(
            f"{directory / ADAPTER}: a PEFT adapter next to the weights is not "
            "applied; merge it (merge_and_unload) and save the result, or move the "
            "file away to load the weights without it"
        )
    files, weight_map = weight_files(directory)
    source = open_files(directory, files, weight_map)
    if missing := weight_map.keys() - source.tensors.keys():
        raise CheckpointError(
            f"{directory}: the index lists {min(missing)}, but no shard has it"
        )
    return source


def _without_config(directory: Path) -> str:
    """Returns a message for a directory without config.json, based on its files."""
    if (directory / "params.json").is_file():
        return f"params.json, but no config.json; {OWN_FORMAT}"
    if (directory / ADAPTER).is_file():
        return (
            "a PEFT adapter, not a model; merge it into its base model "
            "(merge_and_unload) and save the result"
        )
    patterns = ("*/config.json", "snapshots/*/config.json")  # the latter in hub caches
    below = [file for pattern in patterns for file in directory.glob(pattern)]
    if models := [file.parent for file in sorted(below)]:
        return f"no config.json; name a directory that has one, such as {models[0]}"
    if weights_among(file_names(directory)):
        return "weights, but no config.json; put the model's config.json next to them"
    return (
        "no config.json; not a checkpoint (want a directory from transformers, "
        "mamba_ssm or `stree-jax convert`, or a GGUF file)"
    )


def open_files(
    directory: Path,
    files: Sequence[Path],
    weight_map: Mapping[str, Any] = MappingProxyType({}),
) -> Source:
    """Lists the tensors of weight files. Reads only headers.

    Args:
      directory: the checkpoint's directory.
      files: the files.
      weight_map: name of the file for each tensor, from an index. It decides which of
        two files a tensor is read from. Tensors that it does not list are read, too.

    Raises:
      CheckpointError: a file is damaged, or two files have a tensor and the index does
        not say which one to read.
    """
    tensors: dict[str, TensorInfo] = {}
    opened: dict[Path, dict[str, Any]] = {}
    for file in files:
        if file.suffix in PICKLED:
            loaded = _load_bin(file)
            opened = {file: loaded}
            found = {name: _torch_info(file, name, t) for name, t in loaded.items()}
        else:
            found = _safetensors_header(file)
        for name in sorted(tensors.keys() & found.keys()):
            wanted = weight_map.get(name)
            if wanted not in (file.name, tensors[name].file.name):
                raise CheckpointError(
                    f"{file}: {name} is also in {tensors[name].file.name}, and no "
                    "index says which of the two to read"
                )
            if wanted != file.name:
                del found[name]
        tensors |= found
    unlisted = tensors.keys() - weight_map.keys() if weight_map else set[str]()
    return Source(directory, tensors, opened, unlisted=frozenset(unlisted))


def _safetensors_header(file: Path) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    found = {}
    starts: dict[str, int] = {}
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                dtype, start = part.get_dtype(), 0
                if dtype == F8:
                    starts = starts or _starts(file)
                    start = starts[name]
                shape = tuple(part.get_shape())
                found[name] = TensorInfo(file, shape, DTYPES.get(dtype, dtype), start)
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        check_fetched(file)
        raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from (
            error
        )
    return found


def _starts(file: Path) -> dict[str, int]:
    """Returns the offset of each tensor, from a header that safetensors has
    validated."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + v["data_offsets"][0] for name, v in header.items()}


def _load_bin(file: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{file}: reading {file.suffix} files needs torch; pip install torch, "
            "or convert the file to safetensors"
        ) from error
    try:
        zipped = zipfile.is_zipfile(file)  # torch before 1.6 wrote plain pickles
        options: dict[str, Any] = {"map_location": "cpu", "mmap": zipped}
        with warnings.catch_warnings(action="ignore"):  # warnings about unusual pickles
            loaded = torch.load(file, weights_only=True, **options)
    except Exception as error:  # a damaged pickle can raise anything
        check_fetched(file)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        # torch's own message advises to run the code in the pickle.
        if reason.startswith("Weights only load failed"):
            reason = "it contains more than tensors, or it is damaged"
        raise CheckpointError(f"{file}: refused by torch.load ({reason})") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor)
        for name, t in loaded.items()
    ):
        raise CheckpointError(f"{file}: want a dictionary of named tensors")
    return loaded


def _torch_info(file: Path, name: str, tensor: Any) -> TensorInfo:
    """Returns a torch tensor's info.

    Raises:
      CheckpointError: it is not a plain array, or larger than its file.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    plain = plain and not tensor.is_nested
    if not plain or tensor.numel() * tensor.element_size() > file.stat().st_size:
        raise CheckpointError(f"{file}: {name}: not a plain, whole tensor")
    return TensorInfo(file, tuple(tensor.shape), dtype)


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return tensor.numpy()
