"""Loads and writes drafters of every kind."""

import os
from os import PathLike
from typing import Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import Target
from stree_jax.checkpoints.kinds.table import kind_of, kind_of_value
from stree_jax.checkpoints.resolve import valid_path
from stree_jax.common.checks import as_integer, shown, with_hints
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.saved.config import weights_named
from stree_jax.models import Model
from stree_jax.speculation.drafters.table import AUTO, default_drafter

DEMO = "demo"


@with_hints
def load_drafter(
    path_or_hub_id: str | PathLike[str],
    target: Model | None = None,
    dtype: Any = None,
) -> Any:
    """Loads a drafter of any kind, by the names that `--drafter` takes.

    The kind is found by the files. Published drafters and Medusa heads work with the
    model that they were trained for.

    Args:
      path_or_hub_id: a directory, a file, or a name on the hub: of a draft model,
        Medusa heads, a published drafter (DFlash, DFlash2, DSpark, EAGLE-3, P-EAGLE,
        EAGLE-2, an assistant of Gemma 4) or a table of n-grams. "demo", "demo-heads"
        and "demo-dspark" are the bundled ones. Or "lookup", "mtp", "auto", "none", or
        "MODULE:NAME", an object in a Python module, which is imported.
      target: the model that it drafts for. EAGLE drafters need it. If given, a
        published drafter is checked against it, and a copy of its embedding or head is
        not kept twice; a draft model is put on its mesh.
      dtype: "float32", "bfloat16" or "int8". If None, a draft model is as `load` makes
        it; for others, bfloat16 and quantized weights are bfloat16 in memory, and all
        others float32. "kept" and "kept-int8" keep the quantized matrices of draft
        models and block drafters as they are; for drafters without such matrices they
        mean the same as None.

    Returns:
      The drafter as `generate` takes it; None for "none".

    Raises:
      CheckpointError: one line that says what is wrong and where.
      ValueError: the drafter is of another target, or a custom one cannot be imported.

    Example:
      >>> model = stree_jax.load("demo", dtype="float32")
      >>> heads = stree_jax.load_drafter("demo-heads", model)
      >>> result = stree_jax.generate(model, "import os", drafter=heads)
      >>> result.promise
      'tokens'
    """
    if target is not None and not isinstance(target, Model):
        raise ValueError(
            f"target: want a model of stree_jax.load, got {shown(type(target))}"
        )
    if dtype is not None:
        weights_named(dtype)
    valid_path("path_or_hub_id", path_or_hub_id)
    name = os.fspath(path_or_hub_id)
    if name == AUTO:
        return AUTO if target is None else default_drafter(target.config)
    files = DrafterFiles(file_name(name), whole=True)
    return kind_of(files).load(files, target, dtype)


def file_name(name: str) -> str:
    """Returns the name of a drafter's files: "demo" stands for "demo-drafter"."""
    return "demo-drafter" if name == DEMO else name


@with_hints
def save_drafter(
    drafter: Any,
    dst: str | PathLike[str],
    target: str = "",
    target_layers: int | None = None,
) -> None:
    """Writes a drafter in the layout of its kind, atomically; dst must not exist.

    Draft models are written as by `save`. Medusa heads, block drafters and EAGLE-3 are
    written in their public layouts, n-grams as a file.

    Args:
      drafter: the drafter.
      dst: the directory or file to create.
      target: path or hub id of the target model, stored as a note with Medusa heads.
      target_layers: number of the target's layers, as `boundary_count` counts them,
        against which readers of a published drafter check the target. If None, it is
        not written.

    Raises:
      CheckpointError: the drafter has no files, its layout cannot express it, or dst
        cannot be written; dst is not created.

    Example:
      >>> import os, tempfile
      >>> model = stree_jax.load("demo", dtype="float32")
      >>> heads = stree_jax.load_drafter("demo-heads", model)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     stree_jax.save_drafter(heads, folder + "/heads", "demo")
      ...     sorted(os.listdir(folder + "/heads"))
      ['config.json', 'medusa_lm_head.safetensors']
    """
    path, kind = valid_path("dst", dst), kind_of_value(drafter)
    if kind is None:
        raise CheckpointError(f"drafter: nothing to write, got {shown(drafter)}")
    if not isinstance(target, str):
        raise CheckpointError(f"target: want a text, got {type(target).__name__}")
    layers = as_integer(target_layers)
    if target_layers is not None and (layers is None or layers < 1):
        got = shown(target_layers)
        raise CheckpointError(f"target_layers: want a number from 1 on, got {got}")
    kind.save(drafter, path, Target(target, layers))
