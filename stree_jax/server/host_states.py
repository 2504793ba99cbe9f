"""Splits cached states into arrays on the host: rows of KV caches, which belong to
tokens, and the other arrays, which belong to a position of the text.

A past is the pair of the target's and the drafter's states of one row. Each
`models.State` in it has its own length: a draft model may have read less of the text
than the target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import State
from stree_jax.models.layers.mixer import Leaf, map_leaves

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Place:
    """The role of one array of a past.

    Attributes:
      state: index of the `State` that it belongs to, or None outside of states.
      axis: the axis with a row per token, or None.
      shape, dtype: those of the array.
      is_length: True for the length of a `State`.
    """

    state: int | None
    axis: int | None
    shape: tuple[int, ...]
    dtype: np.dtype
    is_length: bool = False


@dataclass(frozen=True, eq=False)
class Form:
    """The arrays of a past by role. Two pasts of one server have the same form.

    Attributes:
      places: the role of each array, in the order of `jax.tree.leaves`.
      tree: structure of the past.
    """

    places: tuple[Place, ...]
    tree: Any

    @classmethod
    def of(cls, past: Any) -> "Form":
        """Returns the form of a past, or of its shapes."""
        numbers = count()

        def place(x: Any, leaf: Leaf, state: int | None) -> Place:
            axis = None if state is None else leaf.capacity_axis
            return Place(state, axis, tuple(x.shape), np.dtype(x.dtype))

        def of_part(x: Any) -> Any:
            if not isinstance(x, State):
                return place(x, Leaf(), None)
            number = next(numbers)
            marked = map_leaves(lambda leaf, about: place(leaf, about, number), x)
            return replace(marked, length=replace(marked.length, is_length=True))

        marked = jax.tree.map(of_part, past, is_leaf=lambda x: isinstance(x, State))
        return cls(tuple(jax.tree.leaves(marked)), jax.tree.structure(past))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Index of the length of each `State` among the arrays."""
        return tuple(i for i, place in enumerate(self.places) if place.is_length)

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """Indices of the KV caches among the arrays."""
        return tuple(i for i, p in enumerate(self.places) if p.axis is not None)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the arrays that are not KV caches."""
        return tuple(i for i, p in enumerate(self.places) if p.axis is None)

    @cached_property
    def only_caches(self) -> bool:
        """True if every `State` consists of KV caches and its length. It can then be
        cut back to any of its tokens."""
        of_states = {i for i in self.others if self.places[i].state is not None}
        return of_states == set(self.lengths)

    @cached_property
    def has_last(self) -> bool:
        """True if there are arrays outside of states, such as the hidden state of the
        last token. They are computed anew from the next token that is read."""
        return any(place.state is None for place in self.places)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the arrays that belong to a position."""
        return sum(_bytes(self.places[i]) for i in self.others)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's rows in all KV caches."""
        places = (self.places[i] for i in self.caches)
        return sum(_bytes(p) // p.shape[p.axis or 0] for p in places)

    def lengths_of(self, arrays: Sequence[Any]) -> list[int]:
        """Returns the number of tokens that each `State` has read.

        Args:
          arrays: all arrays of a past of one row.
        """
        return [int(np.asarray(arrays[i])[0]) for i in self.lengths]

    def kept(self, arrays: Sequence[Any]) -> Arrays:
        """Copies the arrays that are not KV caches to the host."""
        return tuple(np.array(arrays[i]) for i in self.others)

    def read_by(self, kept: Arrays) -> list[int]:
        """Returns, for each KV cache, the number of tokens that its `State` has read.

        Args:
          kept: the other arrays of the past.
        """
        by_index = dict(zip(self.others, kept, strict=True))
        read = [int(by_index[i][0]) for i in self.lengths]
        return [read[self.places[i].state or 0] for i in self.caches]

    def rows(self, cache: int, x: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns a copy of some rows of a KV cache.

        Args:
          cache: which one, an index of `caches`.
          x: the cache, or an array of some of its rows.
          start, end: the rows.
        """
        return x[span(self.axis(cache), start, end)].copy()

    def axis(self, cache: int) -> int:
        """Returns the axis of tokens of a KV cache, an index of `caches`."""
        axis = self.places[self.caches[cache]].axis
        assert axis is not None  # by the definition of `caches`
        return axis

    def cut(self, kept: Arrays, length: int) -> Arrays:
        """Returns the arrays of a past that is cut back to at most `length` tokens. The
        form must have `only_caches`."""
        at = dict(zip(self.others, kept, strict=True))
        for i in self.lengths:
            at[i] = np.minimum(at[i], np.asarray(length, at[i].dtype))
        return tuple(at.values())

    def after(self, parts: Sequence[Arrays], length: int) -> Arrays:
        """Returns the arrays that are not KV caches of a past with at most `length`
        tokens, limited by the available rows. The form must have `only_caches`. Arrays
        outside of states are 0.

        Args:
          parts: rows of each KV cache, in consecutive parts of the text.
          length: number of tokens.
        """
        read: dict[int | None, int] = {}
        for j, i in enumerate(self.caches):
            rows = sum(part[j].shape[self.axis(j)] for part in parts)
            state = self.places[i].state
            read[state] = min(read.get(state, length), rows)
        found = []
        for i in self.others:
            x = np.zeros(self.places[i].shape, self.places[i].dtype)
            if i in self.lengths:
                x[:] = read.get(self.places[i].state, length)
            found.append(x)
        return tuple(found)

    def joined(self, kept: Arrays, parts: Iterable[Arrays]) -> Any:
        """Copies a past to the device, in the form that `init_decoding` takes.

        Args:
          kept: the arrays that are not KV caches.
          parts: rows of each KV cache, in consecutive parts of the text. Rows of tokens
            that a `State` has not read are left out.
        """
        arrays: list[Any] = [None] * len(self.places)
        for i, x in zip(self.others, kept, strict=True):
            arrays[i] = jnp.array(x)
        read, pieces = self.read_by(kept), list(parts)
        for j, i in enumerate(self.caches):
            place, axis, at = self.places[i], self.axis(j), 0
            whole = np.zeros(place.shape, place.dtype)
            for piece in pieces:
                size = min(piece[j].shape[axis], read[j] - at)
                if size <= 0:
                    break
                whole[span(axis, at, at + size)] = piece[j][span(axis, 0, size)]
                at += size
            arrays[i] = jnp.asarray(whole)
        return jax.tree.unflatten(self.tree, arrays)


def span(axis: int, start: int, end: int) -> tuple[slice, ...]:
    """Returns an index that selects `start` to `end` of an axis."""
    return (slice(None),) * axis + (slice(start, end),)


def _bytes(place: Place) -> int:
    return int(np.prod(place.shape)) * place.dtype.itemsize


def bytes_of(arrays: Iterable[np.ndarray]) -> int:
    """Returns the bytes of some arrays."""
    return sum(x.nbytes for x in arrays)
