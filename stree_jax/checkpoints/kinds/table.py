"""The table of kinds of drafters."""

from typing import Any

from stree_jax.checkpoints.kinds.assistant import ASSISTANT
from stree_jax.checkpoints.kinds.block import BLOCK
from stree_jax.checkpoints.kinds.custom import CUSTOM
from stree_jax.checkpoints.kinds.eagle import EAGLE
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.heads import HEADS
from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.checkpoints.kinds.model import DRAFT_MODEL
from stree_jax.checkpoints.kinds.mtp import MTP_LAYERS
from stree_jax.checkpoints.kinds.ngrams import N_GRAMS
from stree_jax.checkpoints.kinds.words import PLAIN, PROMPT_LOOKUP

# The first kind that is found counts.
KINDS: list[DrafterKind] = [
    PLAIN,
    PROMPT_LOOKUP,
    MTP_LAYERS,
    CUSTOM,
    N_GRAMS,
    HEADS,
    ASSISTANT,
    EAGLE,
    BLOCK,
    DRAFT_MODEL,
]


def kind_of(files: DrafterFiles) -> DrafterKind:
    """Returns the kind of drafter that a name stands for."""
    named = kind_without_files(files.name)
    return named or next(k for k in KINDS if k.needs_files and k.found(files))


def kind_without_files(name: str | None) -> DrafterKind | None:
    """Returns the kind of drafter that a name alone stands for, such as "lookup"; None
    for names of files."""
    files = DrafterFiles(name or "")
    return next((k for k in KINDS if not k.needs_files and k.found(files)), None)


def kind_of_value(drafter: Any) -> DrafterKind | None:
    """Returns the kind of a loaded drafter, or None if the table does not have it."""
    return next((k for k in KINDS if k.holds(drafter)), None)
