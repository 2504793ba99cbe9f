"""Reads and writes the weights of a kept model: one safetensors file, which is mapped
into memory without a copy.

Each array of a parameter is a tensor. Tensors begin at multiples of 64 bytes, as XLA
requires of memory that it uses in place, except small ones at the end.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.models import Format, ModelConfig, abstract_params, by_path, nest, stored
from stree_jax.models.base.shards import Cut
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.sharding.parts import cut_at
from stree_jax.models.sharding.placement import on_mesh
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.experts import Experts, expert_at
from stree_jax.models.weights.format import QUANTIZED
from stree_jax.models.weights.panels.kind import ALIGNMENT, aligned
from stree_jax.models.weights.parameters import is_weight
from stree_jax.models.weights.weight import Stored, Weight

PIECE = 2**20  # numbers of a matrix that are dequantized at a time
FILE = "weights.safetensors"  # in params/
NAMES = {"uint8": "U8", "int32": "I32", "float32": "F32", "bfloat16": "BF16"}
DTYPES = {name: np.dtype(dtype) for dtype, name in NAMES.items()}


def write_kept(folder: Path, params: Any) -> None:
    """Writes the parameters of a kept model.

    Args:
      folder: a directory that does not exist yet.
      params: nested dictionary of arrays and weights.
    """
    folder.mkdir()
    arrays = dict(_named(params))
    order = sorted(arrays, key=lambda name: arrays[name].nbytes % ALIGNMENT > 0)
    header, end = dict[str, Any](), 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        header[name] = {
            "dtype": NAMES[arrays[name].dtype.name],
            "shape": list(arrays[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with (folder / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            array = np.ascontiguousarray(arrays[name])
            file.write(array.reshape(-1).view(np.uint8).data)


def _named(params: Any) -> Iterator[tuple[str, Any]]:
    """Yields each array of the parameters with the name of its tensor."""
    for path, leaf in by_path(params).items():
        for keys, array in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            yield "/".join(path) + jax.tree_util.keystr(keys), array


def check_kept(folder: Path, config: ModelConfig, format: Format) -> None:
    """Checks the names, shapes and dtypes of the tensors. Reads only the header.

    Args:
      folder: the directory of the weights.
      config: the architecture.
      format: the format of the stored weights.

    Raises:
      CheckpointError: a tensor is missing, unexpected or has another shape or dtype.
    """
    _check(folder, config, format, _tensors(folder))


def read_kept(
    folder: Path,
    config: ModelConfig,
    stored_format: Format,
    format: Format,
    mesh: Mesh | None,
    cut: Cut,
) -> Any:
    """Reads the parameters of a kept model.

    On one device, weights that stay kept are memory-mapped. Others are dequantized one
    by one.

    Args:
      folder: the directory of the weights. It may have more parameters, which are not
        read.
      config: the architecture.
      stored_format: the format of the stored weights.
      format: the format in which to store them in memory.
      mesh, cut: see `restore.restored`.
    """
    tensors = _tensors(folder)
    flat: dict[ParamPath, Any] = {}
    for path, leaf in by_path(abstract_params(config, stored_format)).items():
        host = jax.tree_util.tree_map_with_path(
            lambda keys, _, path=path: tensors[
                "/".join(path) + jax.tree_util.keystr(keys)
            ],
            leaf,
        )
        host = _converted(host, config, path, format)
        if mesh is None:
            flat[path] = jax.device_put(host)
            continue
        param, parts = cut_at(config, cut, path)
        flat[path] = on_mesh(host, *cut_at(config, cut, path), mesh)
    return nest(flat)


def _converted(host: Any, config: ModelConfig, path: ParamPath, format: Format) -> Any:
    """Converts a parameter from the file to a format."""
    if not is_weight(host):
        return stored(param_at(config, path), host, format)
    if (adopted := format.adopt(host)) is not None:
        return adopted
    dtype = format.source_dtype(QUANTIZED, host.shape)
    return stored(param_at(config, path), _dequantized(host, dtype), format)


def _dequantized(weight: Stored, dtype: np.dtype) -> np.ndarray:
    """Returns the matrix of a weight in a float dtype."""
    matrix = aligned(weight.shape, dtype)
    weight = jax.device_put(weight)  # uses the mapped memory in place
    if isinstance(weight, Experts):
        for e, expert in enumerate(matrix):
            _dequantize(expert_at(weight.stack, e), expert)
    else:
        assert isinstance(weight, Weight)
        _dequantize(weight, matrix)
    return matrix


def _dequantize(weight: Weight, matrix: np.ndarray) -> None:
    """Writes the numbers of a weight to a matrix."""
    m, k = matrix.shape
    step = max(1, PIECE // k)
    for i in range(0, m, step):
        rows = weight.rows(jnp.arange(i, min(i + step, m)))
        matrix[i : i + step] = np.asarray(rows).astype(matrix.dtype)


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """Returns the mapped tensors of the file by name.

    Raises:
      CheckpointError: the file is missing or damaged.
    """
    file = folder / FILE
    try:
        data = np.memmap(file, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        return {name: _view(data[8 + size :], entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file") from error


def _view(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    some = data[begin:end].view(DTYPES[entry["dtype"]])
    return some.reshape(entry["shape"]).view(np.ndarray)


def _check(
    folder: Path, config: ModelConfig, format: Format, found: dict[str, np.ndarray]
) -> None:
    wanted = dict(_named(abstract_params(config, format)))
    for name in sorted(wanted.keys() | found.keys()):
        want, got = _kind(wanted.get(name)), _kind(found.get(name))
        if want != got:
            raise CheckpointError(
                f"{folder / FILE}: {name}: want {want} by config.json, got {got}"
            )


def _kind(array: Any) -> str | None:
    """Returns the dtype and shape of an array, for messages."""
    return None if array is None else f"{array.dtype.name}{list(array.shape)}"
