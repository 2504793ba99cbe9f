"""Finds the files that hold a checkpoint's tensors, and opens them."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import check_fetched, read_text
from stree_jax.convert.tensors.stored_tensors import F8, TensorInfo, Tensors
from stree_jax.convert.tensors.torch_files import PICKLED, load_bin
from stree_jax.models.weights.format import BFLOAT16, FLOAT32

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
}
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # ending of the file that maps tensors to shards
ADAPTER = "adapter_config.json"
MAX_NAME = 255  # characters of a file's name
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(?:safetensors|bin)$")
# Message for params.json, and for tensors with the names of consolidated.*.
OWN_FORMAT = (
    "the formats of Mistral and Meta are not supported; want config.json and "
    "model.safetensors (or its shards and index) as transformers has them"
)


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


def source_dtype(source: Tensors) -> np.dtype:
    """Returns the default dtype for loading a checkpoint.

    It is bfloat16 if the matrices are bfloat16 or any weight is quantized, and float32
    otherwise. float16 becomes float32, because its range is too small for the residual
    stream.
    """
    if any(map(source.is_quantized, source.tensors)):
        return BFLOAT16
    matrices = {info.dtype for info in source.tensors.values() if len(info.shape) == 2}
    return BFLOAT16 if matrices == {"bfloat16"} else FLOAT32


def open_source(directory: Path) -> Tensors:
    """Lists the tensors of a checkpoint directory. Reads only headers.

    Raises:
      CheckpointError: it is not a checkpoint, or incomplete or damaged.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: {_without_config(directory)}")
    if is_file(directory / ADAPTER):
        raise CheckpointError(
            f"{directory / ADAPTER}: a PEFT adapter next to the weights is not "
            "applied; move it and its weights to another directory, and give that with "
            "--adapter to merge it"
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
            "a PEFT adapter, not a model; give its base model, and this directory with "
            "--adapter"
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
) -> Tensors:
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
            loaded = load_bin(file)
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
    return Tensors(directory, tensors, opened, unlisted=frozenset(unlisted))


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
