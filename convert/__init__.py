"""Reads checkpoints of other libraries, and converts them to our own format and
back.

Public names are imported when they are first used, because some of them import jax.
"""

from typing import TYPE_CHECKING

from stree_jax.common.lazy import importer, modules_of

if TYPE_CHECKING:
    from stree_jax.convert.base.errors import CheckpointError as CheckpointError
    from stree_jax.convert.checkpoint import Checkpoint as Checkpoint
    from stree_jax.convert.checkpoint import checked as checked
    from stree_jax.convert.checkpoint import convert_checkpoint as convert_checkpoint
    from stree_jax.convert.opened import Opened as Opened
    from stree_jax.convert.opened import open_local as open_local
    from stree_jax.convert.tensors.checkpoint_files import (
        CheckpointFiles as CheckpointFiles,
    )

_NAMES = {
    "base.errors": "CheckpointError",
    "checkpoint": "Checkpoint checked convert_checkpoint",
    "opened": "Opened open_local",
    "tensors.checkpoint_files": "CheckpointFiles",
}
_MODULE_OF = modules_of(_NAMES)

if not TYPE_CHECKING:  # type checkers would take every name for one that exists
    __getattr__ = importer(__name__, globals())
