"""Matrices of several kinds, stacked by rows, that are used as one weight."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.weight import Weight, take


@struct.dataclass
class Stack(Weight):
    """Matrices of several kinds, stacked by rows.

    Attributes:
      parts: weights [m_i, k].
    """

    parts: tuple[Weight, ...]

    @property
    def format(self) -> Format:
        return self.parts[0].format

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def unit(self, axis: int) -> int:
        return max(part.unit(axis) for part in self.parts)

    def take(self, places: Sequence[slice], axis: int) -> "Stack":
        each = self._places(places, axis)
        return Stack(tuple(take(part, own, axis) for part, own in each))

    def divides(self, places: Sequence[slice], axis: int) -> bool:
        each = self._places(places, axis)
        return all(own and part.divides(own, axis) for part, own in each)

    def _places(
        self, places: Sequence[slice], axis: int
    ) -> Iterator[tuple[Weight, Sequence[slice]]]:
        """Yields each part with its own slices."""
        begin = 0
        for part in self.parts:
            end = begin + part.shape[0]
            own = [
                slice(max(p.start, begin) - begin, min(p.stop, end) - begin)
                for p in places
                if max(p.start, begin) < min(p.stop, end)
            ]
            yield part, places if axis else own
            begin = end

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        reasons = (part.unsupported(rows, valid_count) for part in self.parts)
        return next(filter(None, reasons), None)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        each = [part.product(rows, valid_count, native) for part in self.parts]
        return jnp.concatenate(each, axis=1)

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        reasons = (part.chosen_unsupported(rows, chosen) for part in self.parts)
        return next(filter(None, reasons), None)

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        each = [part.chosen_product(rows, chosen, native) for part in self.parts]
        return jnp.concatenate(each, axis=1)

    def gathered(self, ids: jax.Array) -> Weight:
        """Returns the rows, which may be of several kinds, in bfloat16."""
        return self.format.store(self.rows(ids).astype(jnp.bfloat16))

    def rows(self, ids: jax.Array) -> jax.Array:
        where = jnp.where(ids < 0, ids + self.shape[0], ids)
        found, begin = jnp.zeros((*ids.shape, self.shape[1]), jnp.float32), 0
        for part in self.parts:
            own = jnp.clip(where - begin, 0, part.shape[0] - 1)
            inside = (where >= begin) & (where < begin + part.shape[0])
            found = jnp.where(inside[..., None], part.rows(own), found)
            begin += part.shape[0]
        return found


register_for_export(Stack)
