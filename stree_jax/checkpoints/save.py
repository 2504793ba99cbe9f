"""Writes a model as a converted directory."""

import json
from os import PathLike
from pathlib import Path

import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from stree_jax.checkpoints.resolve import valid_path
from stree_jax.common.checks import with_hints
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.export import tokenizer_json
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.convert.saved.config import saved_format
from stree_jax.convert.saved.store import check_space, write_directory
from stree_jax.convert.tokenizers.special_tokens import SETTINGS
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.models import Model, by_path
from stree_jax.models.sharding.whole_model import gathered, is_local
from stree_jax.models.stack.adapters import has_adapter


@with_hints
def save(model: Model, dst: str | PathLike[str]) -> None:
    """Writes a model as a converted directory, atomically. A model on a mesh is read
    from its devices one parameter at a time, into the host's memory.

    If several processes have parts of the model, each has to call this function. The
    host of process 0 then holds all of it, and process 0 writes.

    Args:
      dst: path of the directory; it must not exist.

    Raises:
      CheckpointError: one line that says what is wrong; dst is not created.

    Example:
      >>> import tempfile
      >>> model = stree_jax.load("demo")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     stree_jax.save(model, folder + "/mine")
      ...     same = stree_jax.load(folder + "/mine").config == model.config
      >>> same
      True
    """
    if not isinstance(model, Model):
        raise CheckpointError(
            f"save: want a model as `load` returns it, got {type(model).__name__}"
        )
    if has_adapter(model.params):
        problem = "model has an adapter; load it with the adapter merged to save it"
        raise CheckpointError(f"save: {problem}")
    path = valid_path("save: dst", dst)
    try:
        whole = model if model.mesh is None else gathered(model)
    except ValueError as error:
        raise CheckpointError(f"save: {error}") from error
    if model.mesh is not None and not is_local(model):
        return _in_one_process(whole, path)
    assert whole is not None  # which it is only in other processes
    _write(whole, path)


def _in_one_process(model: Model | None, path: Path) -> None:
    """Writes a model in process 0, in which it is not None. The other processes wait,
    and raise an error if that one does."""
    error: BaseException | None = None
    try:
        if model is not None:
            _write(model, path)
    except BaseException as raised:  # the other processes are waiting
        error = raised
    failed = broadcast_one_to_all(np.asarray(error is not None))
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"{path}: process 0 did not write it; see its error")


def _write(model: Model, path: Path) -> None:
    format = saved_format(model.weight_format).with_params(by_path(model.params))
    with atomic_directory(path) as temporary:
        check_space(path, model.config, format)
        if model.tokenizer is not None:  # write it first: the config has its checksum
            whole = for_whole_texts(model.tokenizer)
            whole.save(str(temporary / "tokenizer.json"))
            if whole.encode_special_tokens:
                said = tokenizer_json(model.config, whole)
                (temporary / SETTINGS).write_text(json.dumps(said, indent=2) + "\n")
        write_directory(temporary, model.config, format, model.params)
