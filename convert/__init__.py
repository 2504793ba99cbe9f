"""Checkpoints of other libraries to ours, and back."""

import math
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from stree_jax.convert.configs import Warn, read_config
from stree_jax.convert.errors import CheckpointError as CheckpointError
from stree_jax.convert.families import NAMES
from stree_jax.convert.quantized import logical
from stree_jax.convert.rows import Row
from stree_jax.convert.source import Source, open_source
from stree_jax.convert.store import (
    DTYPES,
    SOURCE_CONFIG,
    atomic_directory,
    check_space,
    dtype_named,
    is_ours,
    weights_named,
    write_directory,
)
from stree_jax.convert.tensors import check_tensors, read_param, rows_of
from stree_jax.convert.tokenizer import (
    copy_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from stree_jax.models import ModelConfig, nest, param_shapes, stored

PIECE = 2**24  # numbers looked at together


def source_dtype(source: Source) -> np.dtype:
    """The dtype to load in when none is asked for: bfloat16 stays, all else is float32.

    float16 becomes float32, because its range is too small for the residual stream.
    Quantized weights become bfloat16, and with them what is beside them.
    """
    if source.quantized:
        return DTYPES["bfloat16"]
    matrices = {info.dtype for info in source.tensors.values() if len(info.shape) == 2}
    return DTYPES["bfloat16" if matrices == {"bfloat16"} else "float32"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names, shapes and dtypes are checked; no numbers read yet.

    Attributes:
      rows: one for every parameter.
      dtype: to load the weights in.
    """

    source: Source
    config: ModelConfig
    rows: list[Row]
    dtype: np.dtype

    def read(self, progress: bool = False, warn: Warn | None = None) -> Any:
        """The parameters, of which one at a time is held in the source's dtype too.

        Shard by shard, so that no shard is open beside another.

        Args:
          warn: called once, if a weight is not finite.
        """
        flat, odd, shapes = {}, None, param_shapes(self.config)
        tensors, rows = self.source.tensors, self.rows
        by_shard = sorted(rows, key=lambda row: tensors[row.sources[0]].file)
        total = sum(_nbytes(self.source, row) for row in rows)
        hidden = None if progress else True  # None: shown on a terminal only
        with tqdm(total=total, unit="B", unit_scale=True, disable=hidden) as bar:
            for row in by_shard:
                shape = shapes[row.path]
                param = read_param(self.source, row, shape, self.dtype)
                if warn is not None and odd is None and not _finite(param):
                    odd = _odd_tensor(self.source, row)
                flat[row.path] = stored(row.path[-1], jnp.asarray(param), self.dtype)
                bar.update(_nbytes(self.source, row))
        if warn is not None and odd is not None:
            warn(f"{tensors[odd].file}: {odd} holds NaN or infinity; kept as it is")
        return nest(flat)


def open_checkpoint(
    directory: Path,
    dtype: Any = None,
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = False,
) -> Checkpoint:
    """Check every name, shape and dtype of a PyTorch or safetensors directory.

    Args:
      dtype: to load the weights in; None: see `source_dtype`.
      dt_floor, warn, mtp: see `configs.read_config`.

    Raises:
      CheckpointError: one line, naming the file and the field or tensor.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    if is_ours(directory):
        raise CheckpointError(f"{directory}: is in our format already")
    source = logical(open_source(directory))
    tokenizer_files(directory)
    format, config = read_config(directory, source.tensors, dt_floor, warn, mtp)
    _check_layer_count(source, config)
    rows = rows_of(NAMES[format], config)
    check_tensors(source, rows, config)
    kept = source_dtype(source) if dtype is None else weights_named(dtype)
    return Checkpoint(source, config, rows, kept)


def _finite(array: np.ndarray) -> bool:
    """Neither NaN nor infinity; in pieces, for the memory of the answers."""
    flat = array.reshape(-1)
    pieces = (flat[i : i + PIECE] for i in range(0, flat.size, PIECE))
    return all(np.isfinite(piece).all() for piece in pieces)


def _odd_tensor(source: Source, row: Row) -> str:
    """The first tensor of a row that is not finite; of a cast's overflow, the first."""
    odd = (name for name in row.sources if not _finite(source.read(name)))
    return next(odd, row.sources[0])


def _nbytes(source: Source, row: Row) -> int:
    """Bytes of a row's tensors, as they are stored."""
    infos = [source.tensors[name] for name in row.sources]
    return sum(math.prod(i.shape) * (4 if i.dtype == "float32" else 2) for i in infos)


def _check_layer_count(source: Source, config: ModelConfig) -> None:
    """A layer has at least one tensor: a config of more layers than that is wrong."""
    count = len(config.layers) + len(config.mtp)
    if count > len(source.tensors):
        raise CheckpointError(
            f"{source.directory / 'config.json'}: {count} layers, "
            f"but the weights have only {len(source.tensors)} tensors"
        )


def convert_checkpoint(
    src: Path,
    dst: Path,
    dtype: Any = None,
    progress: bool = True,
    dt_floor: bool = False,
    warn: Warn = warnings.warn,
) -> None:
    """Write a checkpoint as one of our directories, self-contained and atomically.

    With its MTP layers, if it has some; `load` reads them when it is asked to.

    In memory are the parameters in the new dtype and one tensor in its old one.

    Args:
      src: a directory in a supported format.
      dst: must not exist; killed at any moment, it is absent or whole.
      dtype: "float32" or "bfloat16"; None: see `source_dtype`.
      dt_floor: see `configs.read_config`.
      warn: called with one line for what is odd but kept: a weight that is not finite,
        a stop token that is none, MTP layers that are left out, the remains of a
        conversion that was killed.

    Raises:
      CheckpointError: one line saying what is wrong and where; dst is not made.
    """
    with atomic_directory(dst, warn) as temporary:
        if dtype is not None:
            dtype_named(dtype)
        read_tokenizer(src)  # a bad one is refused before the weights are read
        checkpoint = open_checkpoint(src, dtype, dt_floor, warn, mtp=None)
        config, kept = checkpoint.config, checkpoint.dtype
        check_space(dst, config, kept)
        copy_tokenizer(src, temporary)  # before its checksum is taken
        shutil.copyfile(src / "config.json", temporary / SOURCE_CONFIG)
        write_directory(temporary, config, kept, checkpoint.read(progress, warn))
