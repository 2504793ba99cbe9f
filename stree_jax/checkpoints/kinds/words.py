"""Drafters that a word stands for: prompt lookup, and plain decoding."""

from typing import Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.models import Model, ModelConfig
from stree_jax.speculation.drafters.lookup import LOOKUP

NO_DRAFTER = "none"


class WordKind(DrafterKind):
    """A drafter without files.

    Attributes:
      word: what users type.
      drafter: what `generate` takes for it.
    """

    needs_files = False

    def __init__(self, name: str, word: str, drafter: str | None) -> None:
        self.name, self.word, self.drafter = name, word, drafter

    def found(self, files: DrafterFiles) -> bool:
        return files.name == self.word

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> Any:
        return self.drafter

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        return self.drafter

    def holds(self, value: Any) -> bool:
        return (value is None or isinstance(value, str)) and value == self.drafter


PROMPT_LOOKUP = WordKind("prompt lookup", LOOKUP, LOOKUP)
PLAIN = WordKind("none", NO_DRAFTER, None)
