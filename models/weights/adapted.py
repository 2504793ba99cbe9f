"""Weights with a low-rank product that is added to their own, as by a LoRA adapter."""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight, gathered
from stree_jax.models.weights.weight import Weight


@struct.dataclass
class LowRank:
    """A matrix [m, k] of rank r: the product of two.

    Attributes:
      up: [m, r] float32, with the scale of the adapter.
      down: [r, k] float32.
    """

    up: jax.Array
    down: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]


@struct.dataclass
class Adapted(Weight):
    """The sum of a weight and a low-rank matrix, whose products are computed apart.

    Attributes:
      base: a weight of any format, or an array [m, k].
      added: the low-rank matrix.
    """

    base: Any
    added: LowRank

    @property
    def format(self) -> Format:
        return as_weight(self.base).format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return as_weight(self.base).unsupported(rows, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        y = as_weight(self.base).product(rows, valid_count, native)
        how: Literal["xla"] | None = None if native else "xla"
        for matrix in (self.added.down, self.added.up):
            rows = linear(rows, matrix, valid_count=valid_count, implementation=how)
        return y + rows

    def rows(self, ids: jax.Array) -> jax.Array:
        exact = jax.lax.Precision.HIGHEST
        added = jnp.matmul(self.added.up[ids], self.added.down, precision=exact)
        return as_weight(self.base).rows(ids) + added

    def gathered(self, ids: jax.Array) -> Weight:
        added = LowRank(self.added.up[ids], self.added.down)
        return Adapted(gathered(self.base, ids), added)

    def take(self, places: Sequence[slice], axis: int) -> NoReturn:
        raise ValueError("weight: devices cannot divide one with an adapter; merge it")


for _node in (LowRank, Adapted):
    register_for_export(_node)
