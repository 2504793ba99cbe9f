"""Loads LoRA adapters for models whose parameters stay as they are."""

from pathlib import Path
from typing import Any

from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.resolve import headers
from stree_jax.common.checks import with_hints
from stree_jax.convert.adapters.merged import Merged
from stree_jax.convert.adapters.unmerged import unmerged


@with_hints
def load_adapter(adapter: str | Path, base: str | Path) -> Any:
    """Loads a LoRA adapter of peft for `with_adapter`, without merging it.

    Only the config and the headers of the base are read.

    Args:
      adapter: a directory with adapter_config.json and adapter_model.safetensors, or a
        hub id.
      base: the Hugging Face directory or hub id of the model that it was trained for.

    Returns:
      A nested dictionary of `LowRank` matrices, by the names of the model's parameters.

    Raises:
      CheckpointError: the adapter is not supported or belongs to another model, or it
        does more than to add low-rank matrices. The message is one line.
    """
    with headers(base) as path:
        opened = described(path, adapter)
    source, names = opened.source, opened.names
    assert isinstance(source, Merged) and names is not None, "merged by `described`"
    return unmerged(source, names, opened.config)
