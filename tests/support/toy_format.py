"""A weight format for tests: 16 bits a number, stored as bytes in blocks with a scale.

A test registers it with `FORMATS[TOY.name] = TOY`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.format import FLOAT32, Format, Packed
from stree_jax.models.weights.plain import PlainWeight
from stree_jax.models.weights.weight import Weight

LARGEST = 2**15 - 1
SCALE = 4  # bytes of a block's scale


@dataclass(frozen=True)
class ToyFormat(Format):
    """Matrices in blocks of 8 columns if possible; other parameters in float32.

    It keeps ggml's Q8_0 without rounding.
    """

    name: str = "toy16"
    dtype: np.dtype = FLOAT32
    can_be_saved: ClassVar[bool] = True

    def store(self, matrix: Any, columns: int | None = None) -> "Toy":
        m, k = matrix.shape
        size = next(n for n in (8, 4, 2, 1) if (columns or k) % n == 0)
        parts = jnp.asarray(matrix, jnp.float32).reshape(m, k // size, size)
        most = jnp.abs(parts).max(axis=-1)
        scale = jnp.where(most > 0, most / LARGEST, 1.0)
        numbers = jnp.round(parts / scale[..., None]).astype(jnp.int16)
        return Toy(jnp.concatenate([as_bytes(numbers), as_bytes(scale)], axis=-1))

    def keeps(self, scheme: str, shape: Sequence[int]) -> bool:
        return scheme == "q8_0"

    def keep(self, blocks: Sequence[Packed]) -> "Toy":
        stored = np.concatenate([packed.arrays["blocks"] for packed in blocks])
        stored = stored.reshape(len(stored), -1, 34)  # a float16, and 32 int8
        scale = stored[..., :2].copy().view(np.float16).astype(np.float32)
        numbers = stored[..., 2:].view(np.int8).astype(np.int16)
        parts = [numbers.view(np.uint8), scale.view(np.uint8)]
        return Toy(jnp.asarray(np.concatenate(parts, axis=-1)))


TOY = ToyFormat()


@struct.dataclass
class Toy(Weight):
    """A matrix of int16 numbers times scales.

    Attributes:
      blocks: [m, k / size, 2 * size + 4] uint8. The int16 numbers and the float32 scale
        of `size` columns.
    """

    blocks: jax.Array

    @property
    def format(self) -> ToyFormat:
        return TOY

    @property
    def shape(self) -> tuple[int, ...]:
        m, count, width = self.blocks.shape
        return m, count * (width - SCALE) // 2

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        return PlainWeight(self.matrix()).product(rows, valid_count, native)

    def rows(self, ids: jax.Array) -> jax.Array:
        found = self.blocks[ids]
        *lead, width = found.shape
        pairs = found[..., :-SCALE].reshape(*lead, (width - SCALE) // 2, 2)
        numbers = jax.lax.bitcast_convert_type(pairs, jnp.int16).astype(jnp.float32)
        scale = jax.lax.bitcast_convert_type(found[..., -SCALE:], jnp.float32)
        return (numbers * scale[..., None]).reshape(*ids.shape, self.shape[1])


register_for_export(Toy)


def as_bytes(array: jax.Array) -> jax.Array:
    """Returns the bytes of an array [m, n, ...], little-endian, as [m, n, bytes]."""
    found = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return found.reshape(*found.shape[:2], -1)
