"""Reads the tensors of a PyTorch or safetensors checkpoint, one at a time."""

import json
import math
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # and with it, NumPy and safetensors know bfloat16
import numpy as np

from stree_jax.convert.dequantize import Part, Scheme, dequantize, problem
from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.files import check_fetched, read_text
from stree_jax.convert.gguf.blocks import Kind, packed_blocks, read_blocks, read_plain
from stree_jax.convert.rows import Index
from stree_jax.models.weights.weight import Packed

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
}
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # behind such a name: which shard has which tensor
PICKLED = (".bin", ".pt")
F8 = "F8_E4M3"
# Bytes of a number; 2 for others.
BYTES = {F8: 1, "I8": 1, "U8": 1, "float32": 4, "I32": 4, "I64": 8, "float64": 8}
PIECE = 2**24  # numbers of a tensor that are read at once
ALIGNMENT = 64  # bytes, of arrays that XLA:CPU does not copy
ADAPTER = "adapter_config.json"
MAX_NAME = 255  # characters of a file's name
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(?:safetensors|bin)$")
# What to say of params.json, and of tensors that are named as in consolidated.*.
OWN_FORMAT = (
    "Mistral's own format and Meta's are not read; want config.json and "
    "model.safetensors (or its shards and index) as transformers has them"
)


@dataclass(frozen=True)
class TensorInfo:
    """File, shape and dtype of a tensor, without its numbers.

    Attributes:
      start: where its bytes begin in the file, if safetensors has no array for them.
      kind: how a GGUF file stores its numbers.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    kind: Kind | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = math.prod(self.shape)
        if self.kind is not None:
            return self.kind.nbytes(count)
        return count * BYTES.get(self.dtype, 2)


@dataclass(frozen=True)
class PackedInfo:
    """The tensors that one matrix is stored in: names and infos."""

    scheme: Scheme
    parts: Mapping[Part, tuple[str, TensorInfo]]


@dataclass(frozen=True)
class Source:
    """A checkpoint directory or GGUF file: every tensor's info, by name.

    Attributes:
      directory: of the checkpoint, or the file.
      said_by: for messages, the file that the shapes come from.
      tensors: those of the model. A quantized matrix is one of them, without its
        scales; its shape is [out, in], its dtype that of `read` by default.
      opened: the `.bin` file that was read last and its tensors (memory-mapped), one at
        most: the pages that were read count as memory while it is open.
      quantized: how the quantized tensors are stored, by their names in `tensors`.
    """

    directory: Path
    tensors: Mapping[str, TensorInfo]
    opened: dict[Path, dict[str, Any]] = field(default_factory=dict)
    quantized: Mapping[str, PackedInfo] = field(default_factory=dict)
    said_by: str = "config.json"

    def scheme(self, name: str) -> str | None:
        """Returns how a tensor's numbers are stored in few bits, such as "nvfp4" or
        "q4_k"; None if they are plain floats."""
        if name in self.quantized:
            return self.quantized[name].scheme.name
        kind = self.tensors[name].kind
        return None if kind is None or kind.plain else kind.name.lower()

    def is_quantized(self, name: str) -> bool:
        """True if a tensor's numbers are stored in few bits, with scales."""
        return self.scheme(name) is not None

    def is_plain(self, name: str) -> bool:
        """True if some of a tensor's numbers can be read alone."""
        return self.tensors[name].kind is None and name not in self.quantized

    def nbytes(self, name: str) -> int:
        """Returns the bytes of a tensor in its file, scales included."""
        if name in self.quantized:
            return sum(info.nbytes for _, info in self.quantized[name].parts.values())
        return self.tensors[name].nbytes

    def is_mapped(self, name: str) -> bool:
        """True if the arrays that `read` returns may be pages of a file."""
        return self.tensors[name].file.suffix in PICKLED

    def read(self, name: str, dtype: Any = np.float32, index: Index = ()) -> np.ndarray:
        """Reads a tensor as a NumPy array in its own dtype (bfloat16 by ml_dtypes).

        Args:
          dtype: float32 or bfloat16, in place of a quantized tensor's own.
          index: the places that are wanted; of a tensor that is not plain all are read.

        Raises:
          CheckpointError: it cannot be read, or a scale is invalid.
        """
        info = self.tensors[name]
        if info.kind is not None:
            where = info.file, name, info.kind, info.start, info.shape
            if info.kind.plain:
                return read_plain(*where)[index]
            return read_blocks(*where, dtype)[index]
        if name not in self.quantized:
            return self._stored(name, info, index)
        arrays = self._arrays(self.quantized[name])
        return dequantize(self.quantized[name].scheme, arrays, np.dtype(dtype))[index]

    def packed(self, name: str) -> Packed:
        """Reads a matrix that is stored in few bits as it is; `scheme` is not None.

        A GGUF file's blocks are one array "blocks", [m, bytes of a row].

        Raises:
          CheckpointError: it cannot be read, or a scale is invalid.
        """
        info, scheme = self.tensors[name], self.scheme(name)
        assert scheme is not None, f"{name} is not packed"
        arrays: dict[str, np.ndarray] = {}
        if info.kind is None:
            arrays.update(self._arrays(self.quantized[name]).items())
        else:
            where = info.file, name, info.kind, info.start, info.shape
            arrays["blocks"] = packed_blocks(*where)
        return Packed(scheme, info.shape, arrays)

    def _arrays(self, stored: PackedInfo) -> dict[Part, np.ndarray]:
        """Reads the stored numbers and the scales of a matrix."""
        arrays = {part: self._stored(*where) for part, where in stored.parts.items()}
        if (found := problem(stored.scheme, arrays)) is not None:
            part, what = found
            tensor, info = stored.parts[part]
            raise CheckpointError(f"{info.file}: {tensor}: {what}")
        return arrays

    def _stored(self, name: str, info: TensorInfo, index: Index = ()) -> np.ndarray:
        """Reads a tensor, or some of it, as it is in its file."""
        if info.dtype == F8:  # safetensors makes no NumPy arrays of it
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


def _read_slices(name: str, info: TensorInfo, index: Index) -> np.ndarray:
    """Reads some of a tensor from a safetensors file, piece after piece: the pages that
    were read count as memory while the file is open."""
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
    whole = _aligned((count, *first.shape[1:]), first.dtype)
    whole[: len(first)] = first
    for piece in each[1:]:
        begin = piece.start - each[0].start
        whole[begin : begin + piece.stop - piece.start] = read((piece, *rest))
    return whole


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes an array that is aligned as XLA:CPU needs it, so that it is not copied."""
    count = math.prod(shape) * dtype.itemsize
    room = np.empty(count + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + count].view(dtype).reshape(shape)


def at_once(shape: tuple[int, ...], rows: slice = slice(None)) -> Iterator[slice]:
    """Yields rows of a tensor, as many at a time as are read at once."""
    start, stop, _ = rows.indices(shape[0] if shape else 0)
    step = max(PIECE // max(math.prod(shape[1:]), 1), 1)
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


def _read_bytes(name: str, info: TensorInfo) -> np.ndarray:
    """Reads the bytes of a tensor with one byte a number, in its shape."""
    count = math.prod(info.shape)
    try:
        read = np.fromfile(info.file, np.uint8, count, offset=info.start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: {name}: {error}") from error
    if read.size != count:
        raise CheckpointError(f"{info.file}: {name}: the file ends before it does")
    return read.reshape(info.shape)


def is_file(path: Path) -> bool:
    """True if there is such a file. Refuses other things, such as a pipe, which would
    never end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; anything else is an error that names the file."""
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
    """Returns the files that hold the weights: one, or shards and their index's map."""
    found = weights_among(file_names(directory))
    if found is None:
        names = " or ".join(WEIGHT_FILES)
        there = [name for name in file_names(directory) if _SHARD.search(name)]
        also = f" ({there[0]} is a shard, without the index)" if there else ""
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
    """Chooses what is read of the files in a directory: whole weights, an index of
    shards, or the only safetensors file. Returns None if there is nothing of these."""
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
    for name in dict.fromkeys(map(str, weight_map.values())):
        odd = Path(name).name != name or len(name) > MAX_NAME
        if odd or not name.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{index}: weight_map: {name!r} is not a weight file beside the index"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: weight_map: shard {name!r} is missing")
        shards.append(index.parent / name)
    return shards, weight_map


def open_source(directory: Path) -> Source:
    """Lists the tensors of a checkpoint directory; reads headers only."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: {_without_config(directory)}")
    if is_file(directory / ADAPTER):
        raise CheckpointError(
            f"{directory / ADAPTER}: an adapter of PEFT beside the weights, which is "
            "not applied; merge it (merge_and_unload) and save that, or, to load the "
            "weights without it, move the file away"
        )
    files, weight_map = weight_files(directory)
    source = open_files(directory, files)
    if nowhere := weight_map.keys() - source.tensors.keys():
        raise CheckpointError(
            f"{directory}: the index names {min(nowhere)}, but no shard has it"
        )
    return source


def _without_config(directory: Path) -> str:
    """Says what a directory without config.json is, as far as its files tell."""
    if (directory / "params.json").is_file():
        return f"params.json, but no config.json; {OWN_FORMAT}"
    if (directory / ADAPTER).is_file():
        return (
            "an adapter of PEFT, not a model; merge it into its base model "
            "(merge_and_unload) and save that"
        )
    patterns = ("*/config.json", "snapshots/*/config.json")  # the latter in a cache
    below = [file for pattern in patterns for file in directory.glob(pattern)]
    if models := [file.parent for file in sorted(below)]:
        return f"no config.json; name a directory that has one, such as {models[0]}"
    if weights_among(file_names(directory)):
        return (
            "weights, but no config.json, which says what they are; put it beside them"
        )
    return (
        "no config.json; not a checkpoint (want a directory of transformers, mamba_ssm "
        "or `stree-jax convert`, or a GGUF file)"
    )


def open_files(directory: Path, files: Sequence[Path]) -> Source:
    """Lists the tensors of weight files; reads headers only."""
    tensors: dict[str, TensorInfo] = {}
    opened: dict[Path, dict[str, Any]] = {}
    for file in files:
        if file.suffix in PICKLED:
            loaded = _load_bin(file)
            opened = {file: loaded}
            found = {name: _torch_info(file, name, t) for name, t in loaded.items()}
        else:
            found = _safetensors_header(file)
        if repeated := tensors.keys() & found.keys():
            raise CheckpointError(f"{file}: {min(repeated)} is in another shard too")
        tensors |= found
    return Source(directory, tensors, opened)


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
    """Returns where each tensor begins, from a header that safetensors has checked."""
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
            f"{file}: reading {file.suffix} files needs torch; pip install "
            "'stree-jax[torch]', or convert the file to safetensors"
        ) from error
    try:
        zipped = zipfile.is_zipfile(file)  # torch before 1.6 wrote plain pickles
        options: dict[str, Any] = {"map_location": "cpu", "mmap": zipped}
        with warnings.catch_warnings(action="ignore"):  # of odd pickles
            loaded = torch.load(file, weights_only=True, **options)
    except Exception as error:  # a damaged pickle can raise anything
        check_fetched(file)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if reason.startswith("Weights only load failed"):  # and advice to run its code
            reason = "more than tensors is in it, or it is damaged"
        raise CheckpointError(f"{file}: refused by torch.load ({reason})") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor)
        for name, t in loaded.items()
    ):
        raise CheckpointError(f"{file}: want a dictionary of named tensors")
    return loaded


def _torch_info(file: Path, name: str, tensor: Any) -> TensorInfo:
    """Refuses a tensor that is not a plain array or claims more than its file holds."""
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
