"""Opens checkpoints: reads configs and headers, and no weights. Imports no jax."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.adapters.merge import merge_adapter
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn, check_mtp, read_config
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.families.tensors import settle_names, without_left_out
from stree_jax.convert.gguf.checkpoint import open_gguf
from stree_jax.convert.saved.config import (
    FORMAT,
    config_from_json,
    is_ours,
    weights_named,
)
from stree_jax.convert.saved.keeping import layout_of
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import is_gguf
from stree_jax.convert.tensors.mlx import check_layout
from stree_jax.convert.tensors.quantized import logical, scheme_names
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.convert.tensors.tensor_files import open_source, source_dtype
from stree_jax.models import Format, ModelConfig
from stree_jax.models.weights.format import Layout
from stree_jax.models.weights.kept_format import KEPT, kept_kinds, runs_compiled


@dataclass(frozen=True)
class Opened:
    """A local checkpoint whose config and tensor headers have been read, but not its
    weights.

    Attributes:
      files: the files of the checkpoint, including the tokenizer's.
      format: our name of the model family; "gguf" followed by llama.cpp's name of the
        architecture; or "stree-jax" for our own format.
      config: the architecture.
      dtype: dtype in which the weights are loaded by default, unless they are kept.
      quantized: quantization scheme of the weights, such as "nvfp4". None if they are
        not quantized.
      source: the tensors. None for a directory of our own format.
      names: names of the tensors. None for a directory of our own format.
      left_out: names of the tensors that are not read, as patterns such as
        "model.visual.*".
      own_format: format of the stored weights, for a directory of our own format.
    """

    files: CheckpointFiles
    format: str
    config: ModelConfig
    dtype: np.dtype
    quantized: str | None = None
    source: Tensors | None = None
    names: Names | None = None
    left_out: tuple[str, ...] = ()
    own_format: Format | None = None

    @cached_property
    def layout(self) -> Layout:
        """Storage of the matrices in dtype "kept"."""
        if self.source is None or self.names is None:
            return ()
        return layout_of(self.source, self.names, self.config)

    def weight_format(self, dtype: Any = None, warn: Warn | None = None) -> Format:
        """Returns the format in which `load` stores the weights.

        Args:
          dtype: the argument of `load`. If None, "kept" if a matrix can be kept and the
            compiled CPU kernels run here; otherwise `self.dtype`.
          warn: called with one line if no matrix can be kept although `dtype` says so.

        Raises:
          CheckpointError: the dtype is unknown.
        """
        if self.own_format is not None:
            stored = self.own_format
            wanted = stored if dtype is None else weights_named(dtype)
            return wanted.fitted(lambda: stored.layout) or stored
        if dtype is None:
            use = KEPT if runs_compiled() and kept_kinds(self.layout) else self.dtype
            return self.weight_format(use)
        found = weights_named(dtype).fitted(lambda: self.layout)
        if found is not None:
            return found
        if warn is not None:
            warn(
                f"{self.files.path}: no matrix can be kept as it is; loaded in "
                f"{self.dtype}"
            )
        return weights_named(self.dtype)

    def exported_dtype(self) -> np.dtype:
        """Returns the default dtype for exports.

        Raises:
          CheckpointError: the stored weights are kept.
        """
        if self.own_format is not None and not self.own_format.plain:
            raise CheckpointError(
                f"{self.files.path}: its weights are kept as {self.quantized}; to "
                "export them dequantized, give --dtype bfloat16 or float32"
            )
        return self.dtype


def open_local(
    files: CheckpointFiles,
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = False,
    adapter: Path | None = None,
) -> Opened:
    """Reads the config and headers of a directory or a GGUF file.

    If the config ties two tensors and the file has both, also reads these tensors to
    check whether they are equal (`tensors.settle_names`).

    Args:
      files: the checkpoint.
      dt_floor, warn, mtp: see `configs.read_config`. For a directory of our own format
        the config always includes the MTP layers.
      adapter: directory of a LoRA adapter of peft, which is merged. If None, none is.

    Raises:
      CheckpointError: the checkpoint is invalid or unsupported. The message is one line
        with the file and the field or tensor.
    """
    if not files.path.is_dir() and not files.is_gguf:
        raise CheckpointError(f"{files.path}: no such directory")
    if adapter is not None and (files.is_gguf or is_ours(files)):
        raise CheckpointError(
            f"{files.path}: adapters are merged into Hugging Face directories only; "
            "give the one that this was converted from"
        )
    if is_ours(files):
        config, own = config_from_json(files)
        if mtp:
            check_mtp(files.path, config)
        quantized = "+".join(sorted(kept_kinds(own.layout))) or None
        return Opened(files, FORMAT, config, own.dtype, quantized, own_format=own)
    left_out: tuple[str, ...] = ()
    if files.is_gguf:
        source, name, names, config = open_gguf(files, mtp, warn)
        format = f"gguf {name}"
        if mtp:
            check_mtp(files.path, config)
    else:
        source = open_source(files.path)
        check_layout(source)
        source = logical(source, files)
        family, config = read_config(files, source.tensors, dt_floor, warn, mtp)
        format = family.name
        source, left_out = without_left_out(source, family.names, warn)
        names, config = settle_names(source, family.names, config, warn)
        if adapter is not None:
            check_layer_count(source, config)
            source, config = merge_adapter(source, names, config, adapter, warn)
    dtype, quantized = source_dtype(source), scheme_names(source)
    return Opened(files, format, config, dtype, quantized, source, names, left_out)


def check_layer_count(source: Tensors, config: ModelConfig) -> None:
    """Raises CheckpointError if the config has more layers than there are tensors."""
    count, where = len(config.layers) + len(config.mtp), source.directory
    if count > len(source.tensors):
        raise CheckpointError(
            f"{where if is_gguf(where) else where / 'config.json'}: {count} layers, "
            f"but the weights have only {len(source.tensors)} tensors"
        )
