"""Texts whose states are kept, so that a prompt that goes on from one is not read anew.

A state of an SSM has read a text to one place, and cannot go back. It is kept at the
end of an answer; the next turn of a conversation begins with all of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kept:
    """A text and the states after it.

    Attributes:
      ids: all tokens that were read.
      past: states of target and drafter, as of `init_decoding`.
    """

    ids: tuple[int, ...]
    past: Any


class Prefixes:
    """At most so many texts; the one that was used longest ago goes first.

    Attributes:
      hits: prompts that went on from one.
      tokens: that they did not have to read.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.hits = self.tokens = 0
        self._kept: list[Kept] = []  # the last used last

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int]) -> Kept | None:
        """The longest text that a prompt goes on from, by a token at least."""
        asked = tuple(ids)
        fits = [k for k in self._kept if _goes_on(asked, k.ids)]
        if not fits:
            return None
        found = max(fits, key=lambda kept: len(kept.ids))
        self._kept = [k for k in self._kept if k is not found] + [found]
        self.hits += 1
        self.tokens += len(found.ids)
        return found

    def make_room(self, ids: Sequence[int]) -> None:
        """For one text more: an equal one goes, and else the oldest if there are as
        many as may be."""
        self._kept = [k for k in self._kept if k.ids != tuple(ids)]
        del self._kept[: max(len(self._kept) - self.most + 1, 0)]

    def add(self, kept: Kept) -> None:
        self._kept.append(kept)

    def clear(self) -> None:
        self._kept = []


def _goes_on(asked: tuple[int, ...], read: tuple[int, ...]) -> bool:
    return len(asked) > len(read) and asked[: len(read)] == read
