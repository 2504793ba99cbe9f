"""Opens, checks, reads and converts checkpoints."""

import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensor_map import Row
from stree_jax.convert.families.tensors import (
    check_sizes,
    check_tensors,
    dtype_in_file,
    is_finite,
    nonfinite_note,
    nonfinite_tensor,
    packed_blocks,
    packed_experts,
    parts_are_read,
    read_param,
    rows_of,
)
from stree_jax.convert.gguf.checkpoint import write_source_config
from stree_jax.convert.opened import Opened, check_layer_count, open_local
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.convert.saved.config import SOURCE_CONFIG, saved_format
from stree_jax.convert.saved.keeping import note_of_dequantized
from stree_jax.convert.saved.store import check_space, write_directory
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.convert.tokenizers.tokenizer import (
    copy_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from stree_jax.models import Format, ModelConfig, nest, param_shapes
from stree_jax.models.base.shards import WHOLE, Cut
from stree_jax.models.configs.params import Param, array_dtype
from stree_jax.models.sharding.parts import cut_at
from stree_jax.models.sharding.placement import Make, Slices, part_indices, placed
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.parameters import is_weight
from stree_jax.models.weights.weight import take

READERS = 2  # parameters of a kept model that are read at the same time


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names, shapes and dtypes have been checked, but not yet read.

    Attributes:
      source: the tensors.
      config: the architecture.
      rows: one row for every parameter.
      weight_format: format in which the weights are stored in memory.
    """

    source: Tensors
    config: ModelConfig
    rows: list[Row]
    weight_format: Format

    @property
    def note(self) -> str | None:
        """One line about quantized matrices that a kept model stores as bfloat16, or
        None."""
        layout = self.weight_format.layout
        if not layout:
            return None
        return note_of_dequantized(self.source, self.rows, self.config, layout)

    def read(
        self,
        progress: bool = False,
        warn: Warn | None = None,
        mesh: Mesh | None = None,
        cut: Cut = WHOLE,
    ) -> Any:
        """Reads the parameters.

        At most one parameter at a time is also in memory in the source's dtype: on a
        mesh, one part of one; in a kept model, `READERS` parameters. Shards are read
        one after another. On a mesh each process reads only the parts of its own
        devices, except that quantized tensors and those of a GGUF file are read whole,
        one at a time.

        Args:
          progress: True to show a progress bar, on a terminal only.
          warn: called once if a weight contains NaN or infinity.
          mesh: mesh to place the parameters on. If None, they are on one device.
          cut: how the devices of the mesh divide the model, from `placement.cut_for`.
        """
        flat, odd, shapes = {}, list[str](), param_shapes(self.config)
        tensors, rows = self.source.tensors, self.rows
        by_shard = sorted(rows, key=lambda r: [tensors[n].file for n in r.sources[:1]])
        sizes = [sum(map(self.source.nbytes, row.sources)) for row in by_shard]
        hidden = None if progress else True  # None means on terminals only

        def one(row: Row) -> Any:
            param, parts = cut_at(self.config, cut, row.path)
            seen = None if warn is None or odd else odd
            make = self._parts(row, shapes[row.path], param, parts, seen)
            if mesh is None:
                return jax.device_put(make(0))  # jnp.asarray would copy the array twice
            return placed(make, param, parts, mesh)

        with (
            tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=hidden) as bar,
            ThreadPoolExecutor(READERS) as pool,
        ):
            each = (pool.map if mesh is None and self._packs else map)(one, by_shard)
            for row, size, param in zip(by_shard, sizes, each, strict=True):
                flat[row.path] = param
                bar.update(size)
        if warn is not None and odd:
            warn(nonfinite_note(self.source, odd[0]))
        return nest(flat)

    @property
    def _packs(self) -> bool:
        """True if most of the time is for rearranging quantized matrices, which NumPy
        does in several threads at once."""
        mapped = any(map(self.source.is_mapped, self.source.tensors))
        return bool(self.weight_format.layout) and not mapped

    def _parts(
        self,
        row: Row,
        shape: tuple[int, ...],
        param: Param | None,
        parts: int,
        odd: list[str] | None,
    ) -> Make:
        """Returns a function that reads part i of a row's parameter, in the model's
        weight format.

        Args:
          row: the row of the name table that maps tensors to the parameter.
          shape: shape of the whole parameter.
          param, parts: results of `parts.cut_at`: how devices divide the parameter.
          odd: list to which the name of a tensor with NaN or infinity is appended. If
            None, tensors are not checked.
        """
        entry, format = param_at(self.config, row.path), self.weight_format
        dtype = array_dtype(entry, format.dtype)
        if entry.quantizable:
            dtype = format.source_dtype(dtype_in_file(self.source, row), shape)

        def read(axis: int = 0, places: Slices = ()) -> np.ndarray:
            found = read_param(self.source, row, shape, dtype, axis, places)
            if odd is not None and not is_finite(found):
                odd.append(nonfinite_tensor(self.source, row, shape, axis, places))
            return found

        def kept(part: Any) -> Any:
            done = is_weight(part) or not entry.quantizable
            return part if done else format.store(part, shape[-1])

        def whole() -> Any:
            if not entry.quantizable:
                return read()
            if len(shape) == 3:
                blocks = packed_experts(self.source, row, format)
                return read() if blocks is None else format.keep(blocks, shape[0])
            blocks = packed_blocks(self.source, row, format)
            return read() if blocks is None else format.keep(blocks)

        if param is None or parts == 1:
            return lambda i: kept(whole())
        if parts_are_read(self.source, row):
            return lambda i: kept(read(param.axis, part_indices(param, i, parts)))
        all_of_it = jax.tree.map(np.asarray, whole())
        return lambda i: kept(
            take(all_of_it, part_indices(param, i, parts), param.axis)
        )


def checked(opened: Opened, dtype: Any = None) -> Checkpoint:
    """Checks the names, shapes and dtypes of all tensors of a checkpoint.

    Args:
      opened: a checkpoint that is not in our own format.
      dtype: dtype or format in which to keep the weights. If None, `opened.dtype`.

    Raises:
      CheckpointError: a tensor does not fit, or the checkpoint is in our own format.
        The message is one line with the file and the field or tensor.
    """
    source, names, config = opened.source, opened.names, opened.config
    if source is None or names is None:
        raise CheckpointError(f"{opened.files.path}: is in our format already")
    tokenizer_files(opened.files.path)
    check_layer_count(source, config)
    files = opened.files
    check_sizes(files.path if files.is_gguf else files.config_file, config)
    rows = rows_of(names, config)
    check_tensors(source, rows, config, names)
    kept = opened.weight_format(opened.dtype if dtype is None else dtype)
    return Checkpoint(source, config, rows, kept)


def convert_checkpoint(
    src: Path,
    dst: Path,
    dtype: Any = None,
    progress: bool = True,
    dt_floor: bool = False,
    warn: Warn = warnings.warn,
    adapter: Path | None = None,
) -> None:
    """Converts a checkpoint to a directory in our own format.

    The directory is self-contained and written atomically. It includes MTP layers,
    which `load` reads if its `mtp` is True. Memory use is that of the parameters in the
    new dtype, plus one tensor in its old dtype.

    Args:
      src: a directory in a supported format, or a GGUF file.
      dst: path of the new directory, which must not exist. If the process is killed, it
        does not exist or is complete.
      dtype: "float32", "bfloat16", or "kept" to keep quantized weights. If None, see
        `source_dtype`.
      progress: True to show a progress bar, on a terminal only.
      dt_floor: see `configs.read_config`.
      warn: called with one line for each problem that is not an error: a weight with
        NaN or infinity, an invalid stop token, MTP layers or a vision encoder that are
        left out, a tokenizer of an unknown kind, quantized weights that an adapter
        changes, or leftovers of an interrupted conversion.
      adapter: directory of a LoRA adapter of peft, which is merged. If None, none is.

    Raises:
      CheckpointError: the checkpoint is invalid or unsupported, or `dst` cannot be
        written. The message is one line that says what is wrong and where. `dst` is not
        created.
    """
    with atomic_directory(dst, warn) as temporary:
        if dtype is not None:
            saved_format(dtype)
        files = CheckpointFiles(src)
        read_tokenizer(files, warn)  # raises for a bad one before the weights are read
        opened = open_local(files, dt_floor, warn, None, adapter)
        dtype = opened.dtype if dtype is None else dtype
        checkpoint = checked(opened, opened.weight_format(dtype, warn))
        config, format = checkpoint.config, checkpoint.weight_format
        check_space(dst, config, format)
        if (note := checkpoint.note) is not None:
            warn(note)
        copy_tokenizer(files, temporary)  # before `write_directory` takes its checksum
        if files.is_gguf:
            write_source_config(files.header, temporary / SOURCE_CONFIG)
        else:
            shutil.copyfile(files.config_file, temporary / SOURCE_CONFIG)
        write_directory(temporary, config, format, checkpoint.read(progress, warn))
