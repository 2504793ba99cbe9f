"""The table of kinds of drafters. Imports no jax: a kind's own module is imported when
the kind is used."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.finding import (
    is_assistant_drafter,
    is_custom,
    is_eagle_drafter,
    is_heads,
    is_ngrams,
    is_published,
)
from stree_jax.common.words import LOOKUP, MTP, NO_DRAFTER

if TYPE_CHECKING:
    from stree_jax.checkpoints.kinds.kind import DrafterKind


@dataclass(frozen=True)
class Listed:
    """A kind of drafter in the table.

    Attributes:
      found: function that is True if a name stands for a drafter of this kind. Reads
        headers only.
      place: the kind, as MODULE:NAME.
      needs_files: False if the name alone stands for the drafter, such as "lookup".
    """

    found: Callable[[DrafterFiles], bool]
    place: str
    needs_files: bool = True

    @property
    def kind(self) -> "DrafterKind":
        found: DrafterKind = resolve_name(self.place)
        return found


def _is_word(word: str, files: DrafterFiles) -> bool:
    return files.name == word


def _without_files(found: Callable[[DrafterFiles], bool], place: str) -> Listed:
    return Listed(found, f"{HERE}.{place}", needs_files=False)


HERE = __name__.rpartition(".")[0]
# The last kind, of all other files.
DRAFT_MODEL = Listed(lambda files: True, f"{HERE}.model:DRAFT_MODEL")
# The first kind that is found counts.
KINDS = [
    _without_files(partial(_is_word, NO_DRAFTER), "words:PLAIN"),
    _without_files(partial(_is_word, LOOKUP), "words:PROMPT_LOOKUP"),
    _without_files(partial(_is_word, MTP), "mtp:MTP_LAYERS"),
    _without_files(lambda files: is_custom(files.name), "custom:CUSTOM_DRAFTER"),
    Listed(is_ngrams, f"{HERE}.ngrams:N_GRAMS"),
    Listed(is_heads, f"{HERE}.heads:HEADS"),
    Listed(is_assistant_drafter, f"{HERE}.assistant:ASSISTANT"),
    Listed(is_eagle_drafter, f"{HERE}.eagle:EAGLE"),
    Listed(is_published, f"{HERE}.block:BLOCK"),
    DRAFT_MODEL,
]


def listed(files: DrafterFiles) -> Listed:
    """Returns the entry of the kind of drafter that a name stands for."""
    named = _listed_without_files(files)
    return named or next(k for k in KINDS if k.needs_files and k.found(files))


def _listed_without_files(files: DrafterFiles) -> Listed | None:
    return next((k for k in KINDS if not k.needs_files and k.found(files)), None)


def kind_of(files: DrafterFiles) -> "DrafterKind":
    """Returns the kind of drafter that a name stands for."""
    return listed(files).kind


def kind_without_files(name: str | None) -> "DrafterKind | None":
    """Returns the kind of drafter that a name alone stands for, such as "lookup"; None
    for names of files."""
    found = _listed_without_files(DrafterFiles(name or ""))
    return None if found is None else found.kind


def listed_of_value(drafter: Any) -> Listed | None:
    """Returns the entry of a loaded drafter's kind, or None if the table does not have
    it."""
    return next((k for k in KINDS if k.kind.holds(drafter)), None)


def kind_of_value(drafter: Any) -> "DrafterKind | None":
    """Returns the kind of a loaded drafter, or None if the table does not have it."""
    found = listed_of_value(drafter)
    return None if found is None else found.kind
