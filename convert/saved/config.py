"""config.json of our own format: the architecture, the weight format and the
checksums. Imports no jax."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.common.checks import shown
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tokenizers.tokenizer import end_of_text, end_token, has_tokenizer
from stree_jax.models import FORMATS, Format, ModelConfig, param_shapes
from stree_jax.models.stack import config_json
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.format import BFLOAT16, FLOAT32, Layout, Part
from stree_jax.models.weights.panels import KINDS

FORMAT, VERSION = "stree-jax", 2
KEPT_VERSION = 3  # of weights that are not plain: they are in one safetensors file
READABLE = (1, VERSION, KEPT_VERSION)  # version 1 has one config per kind of mixer
FIELDS = {"format", "version", "dtype", "model", "files", "tokenizer", "checksum"}
FIELDS |= {"layout"}  # of kept models
PARAMS = "params"  # folder of the weights
SOURCE_CONFIG = "source_config.json"  # config of the converted checkpoint, for exports


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Returns the storage of a kept model's matrices for config.json."""
    return {"/".join(path): [list(part) for part in parts] for path, parts in layout}


def layout_from_json(values: Any, config: ModelConfig) -> Layout:
    """Returns the storage of a kept model's matrices.

    Raises:
      ValueError: the storage does not fit the architecture.
    """
    shapes = {"/".join(path): (path, z) for path, z in param_shapes(config).items()}
    if not isinstance(values, dict):
        raise ValueError("layout: want an object")
    layout = []
    for name, parts in values.items():
        path, shape = shapes.get(name, ((), ()))
        if not path or not param_at(config, path).quantizable:
            raise ValueError(f"layout: {name[:80]}: not a matrix of the model")
        try:
            found = tuple(_part(shape[-1], *part) for part in parts)
        except TypeError as error:
            raise ValueError(f"layout: {name}: want a list of parts") from error
        if sum(part.rows for part in found) != shape[-2]:
            raise ValueError(f"layout: {name}: want {shape[-2]} rows")
        layout.append((path, found))
    return tuple(layout)


def _part(k: int, kind: Any, rows: Any, columns: Any, factor: Any) -> Part:
    """Returns a checked part of a matrix with k columns."""
    plain = kind in (FLOAT32.name, BFLOAT16.name)
    if not plain and (kind not in KINDS or not KINDS[kind].keeps((rows, k))):
        raise ValueError(f"layout: {kind!r:.40}: no panels of {k} columns")
    if type(rows) is not int or rows < 1 or {type(columns), type(factor)} != {bool}:
        raise ValueError("layout: want parts [kind, rows, columns, factor]")
    return Part(kind, rows, columns, factor)


def dtype_named(dtype: Any) -> np.dtype:
    """Returns the dtype of plain weights on a disk, from a name, a dtype or a format.

    Raises:
      CheckpointError: the format is unknown, or not plain.
    """
    return weights_named(dtype, lambda format: format.plain).dtype


def saved_format(dtype: Any) -> Format:
    """Returns the format for weights of a converted directory.

    Raises:
      CheckpointError: the format is unknown, or models cannot be saved in it.
    """
    return weights_named(dtype, lambda format: format.can_be_saved)


def weights_named(
    dtype: Any, on_disk: Callable[[Format], bool] | None = None
) -> Format:
    """Returns the format of weights, from a name, a dtype or a format.

    Args:
      dtype: the name, dtype or format.
      on_disk: True for formats that can be written to a disk. If None, the weights
        will not be written.

    Raises:
      CheckpointError: the format is unknown, or cannot be written to a disk.
    """
    allowed = on_disk or (lambda _: True)
    names = [name for name, format in FORMATS.items() if allowed(format)]
    wanted = " or ".join(", ".join(names).rsplit(", ", 1))
    name = dtype if isinstance(dtype, str) else ""
    if isinstance(dtype, type | np.dtype):  # an array has a NumPy dtype, too
        with suppress(TypeError):
            name = np.dtype(dtype).name
    found = dtype if isinstance(dtype, Format) else FORMATS.get(name)
    if found is None or found.name not in FORMATS:
        raise CheckpointError(f"dtype: want {wanted}, got {shown(dtype)}")
    if not allowed(found):
        raise CheckpointError(
            f"dtype: models cannot be saved in {found}, only loaded; want {wanted}"
        )
    return found


def config_to_json(config: ModelConfig, format: Format) -> dict[str, Any]:
    values = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": format.name,
        "model": config_json.to_json(config),
    }
    if not format.plain:
        values |= {"version": KEPT_VERSION, "layout": layout_to_json(format.layout)}
    return values


def is_ours(files: CheckpointFiles) -> bool:
    """True if a checkpoint is a directory in our own format."""
    return files.config_file.is_file() and files.json().get("format") == FORMAT


def config_from_json(files: CheckpointFiles) -> tuple[ModelConfig, Format]:
    """Reads the architecture and weight format of a directory in our own format.

    Raises:
      CheckpointError: a field is unknown, missing or invalid.
    """
    values, file = files.json(), files.config_file
    if unknown := values.keys() - FIELDS:
        raise CheckpointError(f"{file}: {min(unknown)}: unknown field")
    if values.get("version") not in READABLE:
        raise CheckpointError(
            f"{file}: version: want {KEPT_VERSION} or before, "
            f"got {values.get('version')!r}"
        )
    try:
        config = config_json.from_json(values.get("model"))
        param_shapes(config)  # raises for sizes that are too large
        format = saved_format(values.get("dtype"))
        if not format.plain:
            layout = layout_from_json(values.get("layout"), config)
            format = replace(format, layout=layout)
    except (ArithmeticError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file}: not a model config ({reason})") from error
    if not config.stop_tokens and "tokenizer" not in values:
        config = replace(config, stop_tokens=_ends_by_later_tokenizer(config, files))
    return config, format


def _ends_by_later_tokenizer(
    config: ModelConfig, files: CheckpointFiles
) -> tuple[int, ...]:
    """Returns the end tokens of a tokenizer that was added after the conversion."""
    if not has_tokenizer(files):
        return ()
    end = end_token(files)
    ends = end_of_text(files) if end is None else (end,)
    return tuple(i for i in ends if i < config.num_tokens)


def check_config(files: CheckpointFiles) -> None:
    """Checks the checksum of config.json, if it has one.

    With a damaged digit in a size or scale the file could still be valid, for another
    model. To edit the file by hand, remove the checksum.

    Raises:
      CheckpointError: the checksum does not match.
    """
    values, file = files.json(), files.config_file
    try:
        whole = values.get("checksum", checksum(values)) == checksum(values)
    except RecursionError:  # deeply nested lists, which no field has
        whole = False
    if not whole:
        raise CheckpointError(
            f"{file}: damaged: its checksum does not match its fields; copy or convert "
            'it again, or remove "checksum" if you edited the file'
        )


def checksum(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of all fields but the checksum, independent of their order
    and formatting."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
