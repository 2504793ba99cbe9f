"""Opens a GGUF file as a `Tensors` of tensors with a `ModelConfig`."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.gguf.architectures import ARCHITECTURES, Architecture
from stree_jax.convert.gguf.keys import (
    check_neutral,
    further_count,
    ignored_keys,
    layer_count,
)
from stree_jax.convert.gguf.names import EMBEDDING
from stree_jax.convert.gguf.rotary import ROPE_FACTORS
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_blocks import NAMES, read_plain
from stree_jax.convert.tensors.gguf_header import Header
from stree_jax.convert.tensors.stored_tensors import TensorInfo, Tensors
from stree_jax.convert.tokenizers.gguf_vocabulary import (
    settings,
    source_fields,
    stop_tokens,
)
from stree_jax.models import ModelConfig, param_shapes

ARCHITECTURE = "general.architecture"
# Values of `general.type` for files that are not models, and what to do with them.
PARTS_OF_MODELS = {
    "adapter": "merge it into its model (llama.cpp's llama-export-lora)",
    "mmproj": "it encodes images for a model; open the model's own file for text",
    "imatrix": "it is for quantizing a model; open the model's own file",
}
SCALE, INPUT_SCALE = "scale", "input_scale"  # last parts of names
QUANTIZED = "bfloat16"  # default dtype for tensors of blocks


def open_gguf(
    files: CheckpointFiles, mtp: bool | None = False, warn: Warn | None = None
) -> tuple[Tensors, str, Names, ModelConfig]:
    """Opens a GGUF file, with all shards if it is the first of several. Reads only the
    headers.

    Args:
      files: the file.
      mtp: True to read the multi-token prediction (MTP) layers. If None, they are read
        if they are supported.
      warn: called with one line if MTP layers are left out because they are invalid,
        or for a key that has no effect although its name says that it should.

    Returns:
      The tensors, llama.cpp's name of the architecture, the names of the tensors, and
      our config.

    Raises:
      CheckpointError: the file is invalid or unsupported. The message is one line.
    """
    header, file = files.header, files.path
    name = architecture_of(header)
    architecture = ARCHITECTURES[name]
    source = Tensors(file, _tensors(header), shapes_from="its metadata")
    fields = _fields(header, name, source)
    try:
        check_neutral(fields, architecture.known + architecture.ignored)
        config = _parse(fields, architecture, mtp, warn)
        param_shapes(config)  # raises for sizes that are too large
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if warn is not None:
        for line in ignored_keys(fields, architecture.ignored):
            warn(line)
    settings(header)  # raises if the tokenizer's settings are invalid
    stops = tuple(i for i in stop_tokens(header) if i < config.vocab_size)
    left_out = 0 if config.mtp else further_count(fields)
    own = _own_tensors(source.tensors, layer_count(fields), left_out)
    names_in = architecture.names_in
    return (
        replace(source, tensors=own),
        name,
        architecture.names if names_in is None else names_in(own),
        replace(config, stop_tokens=stops),
    )


def _parse(
    fields: ConfigFields,
    architecture: Architecture,
    mtp: bool | None,
    warn: Warn | None,
) -> ModelConfig:
    """Parses the metadata; `mtp` and `warn` as in `open_gguf`."""
    config = architecture.parse(fields)
    if mtp is False or architecture.add_mtp is None:
        return config
    try:
        return architecture.add_mtp(fields, config)
    except CheckpointError as error:
        if mtp:
            raise
        if warn is not None:
            warn(f"{error}; its MTP layers are left out")
        return config


def architecture_of(header: Header) -> str:
    """Returns the name of a file's architecture, one of `ARCHITECTURES`."""
    values = header.values
    if (kind := values.get("general.type", "model")) != "model":
        hint = PARTS_OF_MODELS.get(kind) if isinstance(kind, str) else None
        what = f"{kind!r:.60} is not a model" + (f"; {hint}" if hint else "")
        raise CheckpointError(f"{header.file}: general.type: {what}")
    name = values.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{header.file}: {ARCHITECTURE}: {reprlib.repr(name)} is not supported; "
            f"known: {known}"
        )
    return name


def _tensors(header: Header) -> dict[str, TensorInfo]:
    """Returns the infos of all tensors, without the scales of NVFP4 matrices, which
    become the matrices' `factors`."""
    found: dict[str, TensorInfo] = {}
    scales = _scales(header)
    for name, t in header.tensors.items():
        if name in scales:
            continue
        if name.endswith(".ffn_norm"):  # the name in Falcon-H1 files
            name += ".weight"
        if name in found:
            raise CheckpointError(f"{header.file}: {name}: occurs twice")
        dtype = NAMES.get(t.kind.name, QUANTIZED)
        factors = _factors(header, scales, name)
        found[name] = TensorInfo(t.file, t.shape, dtype, t.start, t.kind, factors)
    name = f"{EMBEDDING}.weight"
    if name not in found or len(found[name].shape) != 2:
        raise CheckpointError(f"{header.file}: {name}: is missing, or not a matrix")
    return found


def _scales(header: Header) -> set[str]:
    """Returns the names of tensors with scales of NVFP4 matrices, and of their
    activations, which stay floats here."""
    matrices = [
        name.removesuffix("weight")
        for name, t in header.tensors.items()
        if t.kind.name == "NVFP4" and name.endswith(".weight")
    ]
    named = {f"{m}{word}" for m in matrices for word in (SCALE, INPUT_SCALE)}
    return named & header.tensors.keys()


def _factors(header: Header, scales: set[str], name: str) -> tuple[float, ...]:
    """Returns the factors of an NVFP4 matrix: one, or one for each expert. Empty if the
    file has none, because all are 1."""
    scale = f"{name.removesuffix('weight')}{SCALE}"
    if not name.endswith(".weight") or scale not in scales:
        return ()
    stored, matrix = header.tensors[scale], header.tensors[name]
    wanted: list[tuple[int, ...]] = [(1,)]
    if len(matrix.shape) == 3:
        wanted.append(matrix.shape[:1])
    if stored.kind.name != "F32" or stored.shape not in wanted:
        shown = " or ".join(str(list(shape)) for shape in wanted)
        raise CheckpointError(
            f"{stored.file}: {scale}: want float32 of shape {shown}, got "
            f"{stored.kind.name} {list(stored.shape)}"
        )
    where = stored.file, scale, stored.kind, stored.start, stored.shape
    return tuple(read_plain(*where).tolist())


def _fields(header: Header, name: str, source: Tensors) -> ConfigFields:
    """Returns the architecture's metadata, including the tensor of RoPE factors."""
    prefix = f"{name}."
    values: dict[str, Any] = {
        key.removeprefix(prefix): value
        for key, value in header.values.items()
        if key.startswith(prefix)
    }
    if ROPE_FACTORS in source.tensors:
        values[ROPE_FACTORS] = source.read(ROPE_FACTORS).astype("float32").reshape(-1)
    return ConfigFields(header.file, values, prefix, source.tensors)


def _own_tensors(
    tensors: Mapping[str, TensorInfo], layers: int, further: int
) -> dict[str, TensorInfo]:
    """Returns the tensors of the model, without RoPE factors and the last `further`
    layers, which are for MTP."""
    left = tuple(f"blk.{i}." for i in range(layers - further, layers))
    return {
        name: info
        for name, info in tensors.items()
        if name != ROPE_FACTORS and not name.startswith(left)
    }


def source_config(header: Header) -> dict[str, Any]:
    """Returns fields of a GGUF header for a config.json, without the architecture."""
    return source_fields(header, architecture_of(header))


def write_source_config(header: Header, dst: Path) -> None:
    dst.write_text(json.dumps(source_config(header), indent=2) + "\n")
