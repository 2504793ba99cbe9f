"""Checkpoints of other libraries to ours, and back."""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from stree_jax.convert.checkpoint_files import CheckpointFiles as CheckpointFiles
from stree_jax.convert.configs import Warn, check_mtp, read_config
from stree_jax.convert.errors import CheckpointError as CheckpointError
from stree_jax.convert.families import NAMES
from stree_jax.convert.gguf.checkpoint import open_gguf, write_source_config
from stree_jax.convert.gguf.header import is_gguf
from stree_jax.convert.quantized import logical, scheme_names
from stree_jax.convert.rows import Names, Row
from stree_jax.convert.source import Source, open_source
from stree_jax.convert.store import (
    DTYPES,
    FORMAT,
    SOURCE_CONFIG,
    atomic_directory,
    check_space,
    config_from_json,
    dtype_named,
    is_ours,
    weights_named,
    write_directory,
)
from stree_jax.convert.tensors import (
    check_tensors,
    is_finite,
    odd_tensor,
    parts_are_read,
    read_param,
    rows_of,
    settle_names,
)
from stree_jax.convert.tokenizer import (
    copy_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from stree_jax.models import ModelConfig, nest, param_shapes, stored
from stree_jax.models.params import Param, is_int8
from stree_jax.models.sharding.parts import cut_at
from stree_jax.models.sharding.placement import (
    Make,
    Slices,
    group_for,
    part_indices,
    placed,
    taken,
)
from stree_jax.models.sharding.shards import WHOLE, Cut


def source_dtype(source: Source) -> np.dtype:
    """The dtype to load in when none is asked for: bfloat16 stays, all else is float32.

    float16 becomes float32, because its range is too small for the residual stream.
    Quantized weights become bfloat16, and with them what is beside them.
    """
    if any(map(source.is_quantized, source.tensors)):
        return DTYPES["bfloat16"]
    matrices = {info.dtype for info in source.tensors.values() if len(info.shape) == 2}
    return DTYPES["bfloat16" if matrices == {"bfloat16"} else "float32"]


@dataclass(frozen=True)
class Opened:
    """A local checkpoint whose config and headers are read, but no weights.

    Attributes:
      files: its files, the tokenizer's among them.
      format: our name of its family; "gguf" and llama.cpp's name; or "stree-jax".
      config: the architecture.
      dtype: of the weights as they are loaded if no dtype is given.
      quantized: how the files store the weights, such as "nvfp4"; or None.
      source: the tensors; None for a directory of our own format.
      names: of the tensors.
    """

    files: CheckpointFiles
    format: str
    config: ModelConfig
    dtype: np.dtype
    quantized: str | None = None
    source: Source | None = None
    names: Names | None = None


def open_local(
    files: CheckpointFiles,
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = False,
) -> Opened:
    """Reads the config and headers of a directory or a GGUF file.

    If the config ties two tensors and the file has both, it reads their numbers, to see
    whether they are equal (`tensors.settle_names`).

    Args:
      dt_floor, warn, mtp: see `configs.read_config`. The config of a directory of our
        own format has the MTP layers in any case.

    Raises:
      CheckpointError: one line, naming the file and the field or tensor.
    """
    if not files.path.is_dir() and not files.is_gguf:
        raise CheckpointError(f"{files.path}: no such directory")
    if is_ours(files):
        config, dtype = config_from_json(files)
        if mtp:
            check_mtp(files.path, config)
        return Opened(files, FORMAT, config, dtype)
    if files.is_gguf:
        source, name, architecture, config = open_gguf(files)
        format, names = f"gguf {name}", architecture.names
        if mtp:
            check_mtp(files.path, config)
    else:
        source = logical(open_source(files.path), files)
        format, config = read_config(files, source.tensors, dt_floor, warn, mtp)
        names, config = settle_names(source, NAMES[format], config, warn)
    facts = source_dtype(source), scheme_names(source)
    return Opened(files, format, config, *facts, source, names)


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

    def read(
        self,
        progress: bool = False,
        warn: Warn | None = None,
        mesh: Mesh | None = None,
        cut: Cut = WHOLE,
    ) -> Any:
        """The parameters, of which one at a time is held in the source's dtype too; on
        a mesh, one part of one.

        Shard by shard, so that no shard is open beside another. On a mesh each process
        reads the parts of its devices alone, but for tensors that are quantized or of a
        GGUF file, which are read whole, one at a time.

        Args:
          warn: called once, if a weight that was read is not finite.
          mesh: to put them on; None: they are on one device.
          cut: of `placement.cut_for`, how they are cut over it.
        """
        flat, odd, shapes = {}, list[str](), param_shapes(self.config)
        tensors, rows = self.source.tensors, self.rows
        by_shard = sorted(rows, key=lambda row: tensors[row.sources[0]].file)
        total = sum(_nbytes(self.source, row) for row in rows)
        hidden = None if progress else True  # None: shown on a terminal only
        with tqdm(total=total, unit="B", unit_scale=True, disable=hidden) as bar:
            for row in by_shard:
                param, parts = cut_at(self.config, cut, row.path)
                seen = None if warn is None or odd else odd
                make = self._parts(row, shapes[row.path], param, parts, seen)
                flat[row.path] = (
                    jax.device_put(make(0))  # jnp.asarray would copy it twice
                    if mesh is None
                    else placed(make, param, parts, mesh)
                )
                bar.update(_nbytes(self.source, row))
        if warn is not None and odd:
            file = tensors[odd[0]].file
            warn(f"{file}: {odd[0]} holds NaN or infinity; kept as it is")
        return nest(flat)

    def _parts(
        self,
        row: Row,
        shape: tuple[int, ...],
        param: Param | None,
        parts: int,
        odd: list[str] | None,
    ) -> Make:
        """A function: i -> part i of a row's parameter, as the model keeps it.

        Args:
          shape: of all of it.
          param, parts: of `placement.cut_at`.
          odd: is given the name of a tensor that is not finite; None: nobody asks.
        """

        def read(axis: int = 0, places: Slices = ()) -> np.ndarray:
            found = read_param(self.source, row, shape, self.dtype, axis, places)
            if odd is not None and not is_finite(found):
                odd.append(odd_tensor(self.source, row, shape, axis, places))
            return found

        def kept(part: np.ndarray) -> Any:
            name, group = row.path[-1], group_for(row.path, shape)
            if not is_int8(name, shape, self.dtype):
                return part
            return stored(name, jax.device_put(part), self.dtype, group)

        if param is None or parts == 1:
            return lambda i: kept(read())
        if parts_are_read(self.source, row):
            return lambda i: kept(read(param.axis, part_indices(param, i, parts)))
        whole = read()
        return lambda i: kept(taken(whole, param, part_indices(param, i, parts)))


def checked(opened: Opened, dtype: Any = None) -> Checkpoint:
    """Checks every name, shape and dtype of a directory in another format than ours, or
    of a GGUF file.

    Args:
      dtype: to keep the weights in. If None, that of `opened`.

    Raises:
      CheckpointError: one line, naming the file and the field or tensor.
    """
    source, names, config = opened.source, opened.names, opened.config
    if source is None or names is None:
        raise CheckpointError(f"{opened.files.path}: is in our format already")
    tokenizer_files(opened.files.path)
    _check_layer_count(source, config)
    rows = rows_of(names, config)
    check_tensors(source, rows, config)
    kept = weights_named(opened.dtype if dtype is None else dtype)
    return Checkpoint(source, config, rows, kept)


def _nbytes(source: Source, row: Row) -> int:
    """Returns the bytes of a row's tensors, as they are stored."""
    return sum(map(source.nbytes, row.sources))


def _check_layer_count(source: Source, config: ModelConfig) -> None:
    """A layer has at least one tensor: a config of more layers than that is wrong."""
    count, where = len(config.layers) + len(config.mtp), source.directory
    if count > len(source.tensors):
        raise CheckpointError(
            f"{where if is_gguf(where) else where / 'config.json'}: {count} layers, "
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
      src: a directory in a supported format, or a GGUF file.
      dst: must not exist; killed at any moment, it is absent or whole.
      dtype: "float32" or "bfloat16"; None: see `source_dtype`.
      dt_floor: see `configs.read_config`.
      warn: called with one line for what is odd but kept: a weight that is not finite,
        a stop token that is none, MTP layers that are left out, a tokenizer of an
        unknown kind, the remains of a conversion that was killed.

    Raises:
      CheckpointError: one line saying what is wrong and where; dst is not made.
    """
    with atomic_directory(dst, warn) as temporary:
        if dtype is not None:
            dtype_named(dtype)
        files = CheckpointFiles(src)
        read_tokenizer(files, warn)  # a bad one is refused before the weights are read
        checkpoint = checked(open_local(files, dt_floor, warn, mtp=None), dtype)
        config, kept = checkpoint.config, checkpoint.dtype
        check_space(dst, config, kept)
        copy_tokenizer(files, temporary)  # before its checksum is taken
        if files.is_gguf:
            write_source_config(files.header, temporary / SOURCE_CONFIG)
        else:
            shutil.copyfile(files.config_file, temporary / SOURCE_CONFIG)
        write_directory(temporary, config, kept, checkpoint.read(progress, warn))
