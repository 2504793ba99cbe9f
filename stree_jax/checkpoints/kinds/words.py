"""Drafters that a word stands for: prompt lookup, and plain decoding."""

from typing import Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.common.words import LOOKUP, NO_DRAFTER
from stree_jax.models import Model, ModelConfig


class WordKind(DrafterKind):
    """A drafter without files.

    Attributes:
      drafter: what `generate` takes for it.
    """

    def __init__(self, name: str, drafter: str | None) -> None:
        self.name, self.drafter = name, drafter

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> Any:
        return self.drafter

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        return self.drafter

    def holds(self, value: Any) -> bool:
        return (value is None or isinstance(value, str)) and value == self.drafter


PROMPT_LOOKUP = WordKind("prompt lookup", LOOKUP)
PLAIN = WordKind(NO_DRAFTER, None)
