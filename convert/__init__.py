"""Reads checkpoints of other libraries, and converts them to our own format and
back."""

from stree_jax.convert.base.errors import CheckpointError as CheckpointError
from stree_jax.convert.checkpoint import Checkpoint as Checkpoint
from stree_jax.convert.checkpoint import Opened as Opened
from stree_jax.convert.checkpoint import checked as checked
from stree_jax.convert.checkpoint import convert_checkpoint as convert_checkpoint
from stree_jax.convert.checkpoint import open_local as open_local
from stree_jax.convert.tensors.checkpoint_files import (
    CheckpointFiles as CheckpointFiles,
)
