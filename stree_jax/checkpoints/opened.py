"""Opened checkpoints: what config and headers say, read once for all who ask."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stree_jax.convert import Found, find, source_dtype
from stree_jax.convert.checkpoint_files import CheckpointFiles
from stree_jax.convert.configs import Warn, check_mtp
from stree_jax.convert.quantized import scheme_names
from stree_jax.convert.store import FORMAT, config_from_json, is_ours
from stree_jax.models import ModelConfig


@dataclass(frozen=True)
class Opened:
    """A local checkpoint whose config and headers are read, but no weights.

    Attributes:
      files: its files, the tokenizer's among them.
      format: its family, "gguf" and llama.cpp's name, or "stree-jax".
      config: the architecture.
      dtype: of the weights as `load` reads them if no dtype is given.
      quantized: how the files store the weights, such as "nvfp4"; or None.
      found: tensors and their names; None for a directory of our own format.
    """

    files: CheckpointFiles
    format: str
    config: ModelConfig
    dtype: np.dtype
    quantized: str | None = None
    found: Found | None = None


def open_local(
    path: Path,
    dt_floor: bool = False,
    warn: Warn | None = None,
    mtp: bool | None = None,
) -> Opened:
    """Reads the config and headers of a directory or GGUF file.

    Args:
      dt_floor, warn, mtp: see `convert.find`. The config of our own directories always
        has the MTP layers.

    Raises:
      CheckpointError: one line saying what is wrong and where.
    """
    files = CheckpointFiles(path)
    if is_ours(files):
        config, dtype = config_from_json(files)
        if mtp:
            check_mtp(path, config)
        return Opened(files, FORMAT, config, dtype)
    found = find(files, dt_floor, warn, mtp)
    facts = found.config, source_dtype(found.source), scheme_names(found.source)
    return Opened(files, found.format, *facts, found)
