"""Weights that are arrays, float32 or bfloat16: their products, in the form that each
platform streams fastest."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels import MOST_ROWS as SKINNY
from stree_jax.cpu_kernels import (
    by_platform,
    counts,
    skinny_product,
    table_rows,
    unsupported,
)
from stree_jax.models.weights.weight import Format, Weight

GPU_LEAST = 16  # rows of a product of 8 or 16 bits on a GPU, where there are few


class PlainFormat(Format):
    """Arrays of one float dtype, as most files and libraries have them."""

    plain = True

    def store(self, matrix: Any, columns: int | None = None) -> Any:
        return matrix.astype(self.dtype, copy=False)

    def source_dtype(self, stored: str) -> np.dtype:
        return self.dtype


def plain_format(dtype: Any) -> PlainFormat:
    """Returns the format of arrays of this dtype."""
    found = np.dtype(dtype)
    return PlainFormat(found.name, found)


@dataclass(frozen=True)
class PlainWeight(Weight):
    """An array [m, k] with the methods of a weight; in a model's parameters it is the
    array alone."""

    array: Any

    @property
    def format(self) -> PlainFormat:
        return plain_format(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return unsupported(rows, self.array, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Rounds the rows to the weight's dtype; sums are float32."""
        if rows.shape[0] > SKINNY and not native:
            return _whole(rows, self.array)
        return by_platform(
            rows,
            self.array,
            counts(valid_count),
            cpu=_skinny_native if native else _skinny_cpu,
            cuda=_skinny_gpu,
            default=_whole,
        )

    def rows(self, ids: jax.Array) -> jax.Array:
        return table_rows(self.array, ids, definition=_looked_up)


def _looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids].astype(jnp.float32)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = left.dtype == jnp.float32  # or a GPU would round float32 to tf32
    return jnp.einsum(
        spec,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _whole(rows: jax.Array, weight: jax.Array, _: jax.Array | None = None) -> jax.Array:
    return _product("tk,mk->tm", rows.astype(weight.dtype), weight)


def _skinny_native(
    rows: jax.Array, weight: jax.Array, valid_count: jax.Array
) -> jax.Array:
    return skinny_product(rows, weight, valid_count, definition=_skinny_cpu)


def _skinny_gpu(
    rows: jax.Array, weight: jax.Array, _: jax.Array | None = None
) -> jax.Array:
    """Computes rows [t, k] @ weight.T in the form that XLA:GPU streams fastest.

    For one row XLA makes a product of a matrix and a vector, which it tiles badly: 22.7
    us where 16 rows take 16.8 (10576 x 2560, bfloat16, an H200), 1.3 times the pass.
    """
    count = rows.shape[0]
    if count >= 4 or weight.dtype.itemsize != 2:
        return _whole(rows, weight)
    return _whole(jnp.pad(rows, ((0, GPU_LEAST - count), (0, 0))), weight)[:count]


def _skinny_cpu(
    rows: jax.Array, weight: jax.Array, _: jax.Array | None = None
) -> jax.Array:
    """Computes rows [t, k] @ weight.T in the form that XLA:CPU streams fastest.

    The weight is the left factor, cut into blocks of rows that the cores share. Row
    counts between 4, 8 and the multiples of 16 are slower than the next of these, and
    for one 16-bit row the whole weight would be converted on every call (for two it is
    not).
    """
    (count, k), m = rows.shape, weight.shape[0]
    if count > SKINNY:
        return _whole(rows, weight)
    if count <= 4:
        padded = 2 if weight.dtype.itemsize == 2 and count == 1 else count
    else:
        padded = 8 if count <= 8 else -(-count // 16) * 16
    rows = jnp.pad(rows.astype(weight.dtype), ((0, padded - count), (0, 0)))
    blocks = next(n for n in (4, 2, 1) if m % n == 0)
    y = _product("bmk,kt->bmt", weight.reshape(blocks, m // blocks, k), rows.T)
    y = jax.lax.optimization_barrier(y)  # or XLA puts the weight back on the right
    return y.reshape(m, -1)[:, :count].T
