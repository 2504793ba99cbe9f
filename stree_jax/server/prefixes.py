"""Prefix caching: a prompt that begins with a cached text prefills only the rest.

An SSM state cannot be rolled back, so a cached text can only be continued from its end.
States are cached at the end of an answer, because the next turn of a conversation
begins with the whole text up to there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kept:
    """A text and the states after it.

    Attributes:
      ids: all tokens that the states have read.
      past: states of target and drafter, for `init_decoding`.
    """

    ids: tuple[int, ...]
    past: Any


class Prefixes:
    """A cache of texts with their states, which evicts the least recently used text.

    Attributes:
      limit: maximum number of texts.
      hits: number of prompts that continued a cached text.
      tokens: number of prompt tokens that were not prefilled.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.tokens = 0
        self._kept: list[Kept] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int]) -> Kept | None:
        """Returns the longest cached text that is a proper prefix of a prompt, or
        None."""
        prompt = tuple(ids)
        fits = [k for k in self._kept if _continues(prompt, k.ids)]
        if not fits:
            return None
        found = max(fits, key=lambda kept: len(kept.ids))
        self._kept = [k for k in self._kept if k is not found] + [found]
        self.hits += 1
        self.tokens += len(found.ids)
        return found

    def evict_for(self, ids: Sequence[int]) -> None:
        """Makes space for a text. Evicts an equal text, or else the least recently used
        one if the cache is full."""
        self._kept = [k for k in self._kept if k.ids != tuple(ids)]
        del self._kept[: max(len(self._kept) - self.limit + 1, 0)]

    def add(self, kept: Kept) -> None:
        """Adds a text to the cache. `evict_for` must have been called before, to make
        space for it."""
        self._kept.append(kept)

    def clear(self) -> None:
        """Evicts all texts."""
        self._kept = []


def _continues(prompt: tuple[int, ...], read: tuple[int, ...]) -> bool:
    """True if `read` is a proper prefix of a prompt."""
    return len(prompt) > len(read) and prompt[: len(read)] == read
