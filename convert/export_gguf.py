"""Writes models as GGUF files that llama.cpp can load."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.checkpoint import checked
from stree_jax.convert.export import kept_fields
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensor_map import split
from stree_jax.convert.families.tensors import read_param
from stree_jax.convert.gguf.rotary import ROPE_FACTORS
from stree_jax.convert.gguf.writing import (
    FILE_TYPES,
    Described,
    Placed,
    check_fits,
    describe,
    placed,
)
from stree_jax.convert.opened import Opened
from stree_jax.convert.saved.atomic import atomic_file
from stree_jax.convert.saved.store import SPACE_MARGIN, check_free, read_params
from stree_jax.convert.tensors.gguf_blocks import file_bytes, read_plain
from stree_jax.convert.tensors.gguf_quantize import BY_NAME, encoded
from stree_jax.convert.tensors.gguf_write import Entry, write_container
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.convert.tokenizers.gguf_tokens import header_values, vocabulary_values
from stree_jax.convert.tokenizers.tokenizer import read_tokenizer, token_names
from stree_jax.models import ModelConfig, by_path, format_of, param_shapes
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.stack.adapters import has_adapter

Read = Callable[[ParamPath], np.ndarray]
"""Returns the parameter at a path, float32 or bfloat16."""
QUANTIZATION_VERSION = 2  # of the layouts in `gguf_quantize`


def write_gguf(
    config: ModelConfig,
    params: Any,
    type_name: str,
    dst: Path,
    tokenizer_values: Mapping[str, Any] | None = None,
    progress: bool = False,
    warn: Warn = warnings.warn,
) -> None:
    """Writes a model as a GGUF file.

    Args:
      config: the architecture.
      params: nested dictionary of float32 or bfloat16 arrays, as from `init_params`.
      type_name: type of the matrices, "f32", "bf16", "f16", "q8_0", "q4_0", "q4_k" or
        "q6_k". `gguf.writing.placed` says which tensors have another type.
      dst: path of the new file, which must not exist. If the process is killed, it does
        not exist or is complete.
      tokenizer_values: metadata of the tokenizer and the chat template, from
        `vocabulary_values`. If None, the file has no tokenizer.
      progress: True to show a progress bar, on a terminal only.
      warn: called with one line if some matrices cannot have the type.

    Raises:
      CheckpointError: llama.cpp cannot express the model, no matrix can have the type,
        a number is too large for it, the file cannot be written, or `params` are
        quantized or have an adapter.
    """
    model = describe(config)
    if has_adapter(params):
        raise CheckpointError(
            "GGUF: the model has an adapter; load it with the adapter merged"
        )
    if not format_of(params).plain:
        raise CheckpointError(
            "GGUF: the weights are quantized; load the model in bfloat16 or float32"
        )
    flat = by_path(params)
    values = tokenizer_values
    if values is None:
        values = vocabulary_values(None, config.vocab_size, {}, config.stop_tokens)
    _write(model, type_name, values, _from(flat), {}, dst, progress, warn)


def export_gguf(
    opened: Opened,
    dst: Path,
    type_name: str | None = None,
    template: str | None = None,
    progress: bool = True,
    warn: Warn = warnings.warn,
) -> None:
    """Writes a checkpoint as a GGUF file, with its tokenizer and special tokens.

    One parameter at a time is in memory, except for a directory of our own format,
    which is read whole. Tensors of a GGUF file that have the type already are copied,
    and so is its tokenizer.

    Args:
      opened: the checkpoint.
      dst, progress, warn: as in `write_gguf`. Warnings are also about texts that
        llama.cpp encodes differently.
      type_name: as in `write_gguf`. If None, "bf16" for bfloat16 weights and "f32" for
        others that are not quantized.
      template: the chat template, if the checkpoint has one.

    Raises:
      CheckpointError: as in `write_gguf`; or `type_name` is None and the weights are
        quantized.
    """
    files, config = opened.files, opened.config
    name = type_name or _default_type(opened)
    prefer = opened.format.removeprefix("gguf ")
    context = kept_fields(config, files.path).get("max_position_embeddings")
    model = describe(config, context, prefer)
    if config.mtp and not model.config.mtp:
        warn(f"{dst}: the MTP layers are left out (llama.cpp's {model.name})")
    if files.is_gguf:
        values = header_values(files.header)
    else:
        named, tokenizer = token_names(files), read_tokenizer(files, warn)
        size, stops = config.vocab_size, config.stop_tokens
        values = vocabulary_values(tokenizer, size, named, stops, template, warn)
    stored: Mapping[str, TensorInfo] = {}
    if opened.source is not None and files.is_gguf and model.name == prefer:
        stored = opened.source.tensors
        if (t := files.header.tensors.get(ROPE_FACTORS)) is not None:
            factors = read_plain(t.file, ROPE_FACTORS, t.kind, t.start, t.shape)
            model = replace(model, factors=factors.reshape(-1))
    _write(model, name, values, _reader(opened), stored, dst, progress, warn)


def _default_type(opened: Opened) -> str:
    if opened.quantized is not None:
        known = ", ".join(FILE_TYPES)
        raise CheckpointError(
            f"{opened.files.path}: the weights are quantized ({opened.quantized}); "
            f"choose the type of the file with --type: {known}"
        )
    return "bf16" if opened.dtype.name == "bfloat16" else "f32"


def _reader(opened: Opened) -> Read:
    """Returns the function that reads a checkpoint's parameters."""
    if opened.own_format is not None:
        own = opened.own_format
        dtype = own.dtype if own.plain else np.dtype(np.float32)
        return _from(by_path(read_params(opened.files, opened.config, dtype)))
    checkpoint = checked(opened)
    rows = {row.path: row for row in checkpoint.rows}
    shapes = param_shapes(opened.config)

    def read(path: ParamPath) -> np.ndarray:
        return read_param(checkpoint.source, rows[path], shapes[path], np.float32)

    return read


def _from(flat: Mapping[ParamPath, Any]) -> Read:
    return lambda path: np.asarray(flat[path])


def _write(
    model: Described,
    type_name: str,
    tokenizer_values: Mapping[str, Any],
    read: Read,
    stored: Mapping[str, TensorInfo],
    dst: Path,
    progress: bool,
    warn: Warn,
) -> None:
    """Writes a file; `stored` has the tensors of a GGUF file of the same architecture,
    by name."""
    if type_name not in FILE_TYPES:
        raise CheckpointError(
            f"type: want {', '.join(FILE_TYPES)}, got {type_name!r:.40}"
        )
    params = placed(model, type_name)
    tensors = [tensor for each in params for tensor in each]
    if (text := check_fits(tensors, type_name)) is not None:
        warn(f"{dst}: {text}")
    entries = [Entry(model.spelled(t.name), t.shape, t.kind) for t in tensors]
    first: list[np.ndarray] = []
    if model.factors is not None:
        first = [encoded(ROPE_FACTORS, model.factors, BY_NAME["F32"])]
        entries.insert(0, Entry(ROPE_FACTORS, model.factors.shape, BY_NAME["F32"]))
    values = {
        **model.values,
        "general.name": dst.stem.encode(errors="replace").decode(),
        "general.file_type": FILE_TYPES[type_name],
        "general.quantization_version": QUANTIZATION_VERSION,
        **tokenizer_values,
    }
    total = sum(entry.nbytes for entry in entries)
    hidden = None if progress else True  # None means on terminals only
    with (
        atomic_file(dst, warn) as file,
        tqdm(total=total, unit="B", unit_scale=True, disable=hidden) as bar,
    ):
        check_free(dst, total + SPACE_MARGIN)

        def data() -> Iterator[np.ndarray]:
            yield from first
            for each in params:
                for part in _encoded(model, each, read, stored):
                    bar.update(part.nbytes)
                    yield part

        with file.open("wb") as opened:
            write_container(opened, values, entries, data())


def _encoded(
    model: Described,
    tensors: Sequence[Placed],
    read: Read,
    stored: Mapping[str, TensorInfo],
) -> Iterator[np.ndarray]:
    """Yields the bytes of the tensors of one parameter."""
    copies = [_copy(tensor, stored.get(tensor.name)) for tensor in tensors]
    parts: dict[str, np.ndarray] = {}
    if any(copy is None for copy in copies):
        row = tensors[0].row
        param = read(row.path).astype(np.float32, copy=False)
        parts = split(row, model.in_file(row, param))
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy is None:
            yield encoded(tensor.name, parts[tensor.name], tensor.kind)
        else:
            yield copy


def _copy(tensor: Placed, info: TensorInfo | None) -> np.ndarray | None:
    """Returns the bytes of a tensor in a GGUF file, or None if it has another type."""
    if info is None or info.kind != tensor.kind or info.factors:
        return None
    size = tensor.kind.nbytes(math.prod(tensor.shape))
    return file_bytes(info.file, tensor.name, info.start, size)
