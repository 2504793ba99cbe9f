"""Caches states: a prompt that begins with a cached text prefills only the rest.

An SSM state cannot be rolled back, so a text can only be continued from a position
whose state was cached: the end of a prompt (to generate its answer again), the end of
an answer (for the next turn, or another one in its place), and the end of a beginning
that several conversations have in common, such as a system prompt.

States are kept on the host. The KV caches of a text are stored once, in segments: the
state after a longer text shares the segments of the state that it continued, and caches
have only as many rows as the text has tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models.layers.mixer import Leaf, map_leaves

Segment = tuple[np.ndarray, ...]  # one array per KV cache of the target
RECENT = 2  # states of a conversation that are evicted last: its last prompt and answer

_conversations = count()


@dataclass(frozen=True, eq=False)
class Kept:
    """A cached text with the states after it, on the host.

    Attributes:
      ids: [n] int32. All tokens that the states have read.
      past: states of target and drafter as NumPy arrays. The target's KV caches are in
        `segments` instead, and the drafter's have only the entries that are in use.
      segments: the entries of the target's KV caches, in consecutive parts of the text.
      rows: capacity in tokens of each KV cache on the device: the target's caches, then
        the drafter's.
      conversation: number of the conversation that the text belongs to.
      shared: True if several conversations begin with the text.
      answered: True if the text ends with an answer.
    """

    ids: np.ndarray
    past: Any
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]
    conversation: int
    shared: bool = False
    answered: bool = False

    def restored(self) -> Any:
        """Copies the states to the device, in the form that `init_decoding` takes as
        `past`."""
        rows, caches = iter(self.rows), zip(*self.segments, strict=True)
        target, drafting = self.past

        def put(x: np.ndarray, leaf: Leaf, parts: Sequence[np.ndarray]) -> jax.Array:
            axis = leaf.capacity_axis
            if axis is None:
                return jnp.asarray(x)
            shape = [*x.shape]
            shape[axis] = next(rows)
            whole = np.zeros(shape, x.dtype)
            joined = np.concatenate(parts, axis)
            whole[_span(axis, 0, joined.shape[axis])] = joined
            return jnp.asarray(whole)

        def of_target(x: np.ndarray, leaf: Leaf) -> jax.Array:
            return put(x, leaf, () if leaf.capacity_axis is None else next(caches))

        return (
            map_leaves(of_target, target),
            map_leaves(lambda x, leaf: put(x, leaf, [x]), drafting),
        )

    def arrays(self) -> list[np.ndarray]:
        """Returns all arrays of this entry. Other entries may contain some of them."""
        return [
            *jax.tree.leaves(self.past),
            *(x for part in self.segments for x in part),
        ]


def kept_text(
    ids: np.ndarray,
    past: Any,
    before: Kept | None,
    *,
    shared: bool = False,
    answered: bool = False,
) -> Kept:
    """Copies the states after a text to the host.

    Args:
      ids: [n] int32. The tokens that the states have read.
      past: states of target and drafter of one row, on the device.
      before: a cached beginning of the text, whose segments are shared, or None.
      shared, answered: see `Kept`.
    """
    start, rows, new = 0 if before is None else len(before.ids), [], []

    def rest(x: jax.Array, leaf: Leaf, end: int) -> np.ndarray:
        axis, host = leaf.capacity_axis, np.asarray(x)
        if axis is None:
            return host
        rows.append(x.shape[axis])
        return _rows(host, axis, 0, end)

    def of_target(x: jax.Array, leaf: Leaf) -> np.ndarray:
        if leaf.capacity_axis is not None:
            new.append(_rows(np.asarray(x), leaf.capacity_axis, start, len(ids)))
        return rest(x, leaf, 0)

    target, drafting = past
    host = (
        map_leaves(of_target, target),
        map_leaves(lambda x, leaf: rest(x, leaf, len(ids) + 1), drafting),
    )
    begins = before is None or before.shared or shared
    return Kept(
        ids,
        host,
        (*(before.segments if before else ()), tuple(new)),
        tuple(rows),
        before.conversation if before and not begins else next(_conversations),
        shared,
        answered,
    )


def _rows(x: np.ndarray, axis: int, start: int, end: int) -> np.ndarray:
    """Returns a copy of some rows of a cache."""
    return x[_span(axis, start, end)].copy()


def _span(axis: int, start: int, end: int) -> tuple[slice, ...]:
    """Returns an index that selects `start` to `end` of an axis."""
    return (slice(None),) * axis + (slice(start, end),)


class Prefixes:
    """A cache of texts with their states, whose bytes are limited.

    If it is full, it evicts states of the conversation that was used least recently,
    unless one conversation takes more than half of the space.

    Attributes:
      limit: maximum bytes, in units of the states of one row of the batch.
      row_bytes: bytes of that unit, or 0 before the first text.
      hits: number of prompts that continued a cached text.
      tokens: number of prompt tokens that were not prefilled.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.row_bytes = self.hits = self.tokens = 0
        self._kept: list[Kept] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes of all cached states."""
        return _bytes(self._kept)

    def take(self, ids: Sequence[int]) -> Kept | None:
        """Returns the longest cached text that is a proper prefix of a prompt, or None.
        Marks all cached texts that are such prefixes as recently used."""
        fits = self._beginnings(ids)
        self._kept = [k for k in self._kept if k not in fits] + fits
        if not fits:
            return None
        self.hits += 1
        self.tokens += len(fits[-1].ids)
        return fits[-1]

    def common(self, ids: Sequence[int]) -> int:
        """Returns the largest number of tokens that a prompt has in common with the
        beginning of a cached text."""
        prompt = np.asarray(ids, np.int32)
        return max((common_length(prompt, k.ids) for k in self._kept), default=0)

    def add(
        self,
        text: Sequence[int],
        past: Any,
        *,
        shared: bool = False,
        answered: bool = False,
    ) -> None:
        """Caches the states after a text, and evicts other texts while all states
        together exceed the limit.

        Args:
          text: the token ids of the text. The states have read all but the last one.
          past: states of target and drafter of one row, on the device.
          shared, answered: see `Kept`.
        """
        ids, fits = np.asarray(text[:-1], np.int32), self._beginnings(text)
        before = fits[-1] if fits else None
        if before is not None and len(before.ids) == len(ids):
            return  # the same text
        self.row_bytes = sum(x.nbytes for x in jax.tree.leaves(past))
        kept = kept_text(ids, past, before, shared=shared, answered=answered)
        self._kept.append(kept)
        while len(self._kept) > 1 and self.bytes > self.limit * self.row_bytes:
            self._kept.remove(self._least_useful(kept))

    def _beginnings(self, text: Sequence[int]) -> list[Kept]:
        """Returns the cached texts that are proper prefixes of a text, the longest
        last."""
        most = np.asarray(text[:-1], np.int32)
        fits = [k for k in self._kept if common_length(most, k.ids) == len(k.ids)]
        return sorted(fits, key=lambda kept: len(kept.ids))

    def _least_useful(self, newest: Kept) -> Kept:
        """Chooses the text to evict next, other than `newest`.

        The text is from a conversation that takes more than half of the space, if there
        is one, and otherwise from the conversation that was used least recently. Within
        it, prompts before the last `RECENT` texts go first, then the oldest text.
        """
        groups: dict[int, list[Kept]] = {}
        for kept in reversed(self._kept):
            groups.setdefault(kept.conversation, []).insert(0, kept)
        half = self.limit * self.row_bytes / 2
        large = [group for group in groups.values() if _bytes(group) > half]
        group = large[0] if large and len(large[0]) > 1 else list(groups.values())[-1]
        early = [kept for kept in group[:-RECENT] if not kept.answered]
        return next(k for k in (*early, *group) if k is not newest)

    def clear(self) -> None:
        """Evicts all texts."""
        self._kept = []


def _bytes(texts: Sequence[Kept]) -> int:
    """Returns the bytes of the states of some texts. Shared arrays count once."""
    arrays = {id(x): x.nbytes for kept in texts for x in kept.arrays()}
    return sum(arrays.values())


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of equal tokens at the beginning of two texts."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
