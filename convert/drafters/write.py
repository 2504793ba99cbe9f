"""Writes drafters in layouts that other programs read: config.json and
model.safetensors."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.saved.atomic import atomic_directory

WEIGHTS = "model.safetensors"


def write_drafter(
    dst: str | PathLike[str],
    fields: dict[str, Any],
    arrays: dict[str, np.ndarray],
    dtype: np.dtype,
    target_layers: int | None = None,
) -> None:
    """Writes the directory of a drafter, atomically; dst must not exist.

    Args:
      dst: the directory to create.
      fields: fields of config.json.
      arrays: the tensors by their public names.
      dtype: dtype of the weights.
      target_layers: number of the target's layers, as `boundary_count` counts them,
        against which a reader checks the target. If None, it is not written.
    """
    from safetensors.numpy import save_file

    fields = fields | {"dtype": dtype.name}
    if target_layers is not None:
        fields["num_target_layers"] = target_layers
    with atomic_directory(Path(dst)) as temporary:
        save_file(arrays, temporary / WEIGHTS, {"format": "pt"})
        text = json.dumps(fields, indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
