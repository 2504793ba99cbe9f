"""Checkpoints of other libraries to ours, and back."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from stree_jax.convert.configs import read_config
from stree_jax.convert.errors import CheckpointError as CheckpointError
from stree_jax.convert.source import Source, open_source
from stree_jax.convert.store import (
    DTYPES,
    atomic_directory,
    dtype_named,
    write_directory,
)
from stree_jax.convert.tensors import check_tensors, nest, read_param, rows_of
from stree_jax.convert.tokenizer import copy_tokenizer, read_tokenizer
from stree_jax.models import ModelConfig


def source_dtype(source: Source) -> np.dtype:
    """The dtype to load in when none is asked for: bfloat16 stays, all else is float32.

    float16 becomes float32, because its range is too small for the residual stream.
    """
    matrices = {info.dtype for info in source.tensors.values() if len(info.shape) == 2}
    return DTYPES["bfloat16" if matrices == {"bfloat16"} else "float32"]


def read_checkpoint(
    directory: Path, dtype: Any = None, progress: bool = False, dt_floor: bool = False
) -> tuple[ModelConfig, Any, np.dtype]:
    """Config, parameters and dtype of a PyTorch or safetensors directory.

    Every name, shape and dtype is checked before the first tensor is read.

    Raises:
      CheckpointError: one line, naming the file and the field or tensor.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    source = open_source(directory)
    format, config = read_config(directory, source.tensors, dt_floor)
    _check_layer_count(source, config)
    rows = rows_of(format, config)
    check_tensors(source, rows, config)
    kept = source_dtype(source) if dtype is None else dtype_named(dtype)
    flat = {}
    total = sum(_nbytes(source, name) for row in rows for name in row.sources)
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for row in rows:
            flat[row.path] = jnp.asarray(read_param(source, row, kept))
            bar.update(sum(_nbytes(source, name) for name in row.sources))
    return config, nest(flat), kept


def _nbytes(source: Source, name: str) -> int:
    info = source.tensors[name]
    return int(np.prod(info.shape)) * (4 if info.dtype == "float32" else 2)


def _check_layer_count(source: Source, config: ModelConfig) -> None:
    """A layer has at least one tensor: a config of more layers than that is wrong."""
    if len(config.layers) > len(source.tensors):
        raise CheckpointError(
            f"{source.directory / 'config.json'}: {len(config.layers)} layers, "
            f"but the weights have only {len(source.tensors)} tensors"
        )


def convert_checkpoint(
    src: Path,
    dst: Path,
    dtype: Any = None,
    progress: bool = True,
    dt_floor: bool = False,
) -> None:
    """Write a checkpoint as one of our directories, self-contained and atomically.

    Args:
      src: a directory in a supported format.
      dst: must not exist; killed at any moment, it is absent or whole.
      dtype: "float32" or "bfloat16"; None: see `source_dtype`.
      dt_floor: see `configs.read_config`.

    Raises:
      CheckpointError: one line saying what is wrong and where; dst is not made.
    """
    with atomic_directory(dst) as temporary:
        read_tokenizer(src)  # a bad one is refused before the weights are read
        config, params, kept = read_checkpoint(src, dtype, progress, dt_floor)
        write_directory(temporary, config, kept, params)
        copy_tokenizer(src, temporary)
