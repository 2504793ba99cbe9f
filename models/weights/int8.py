"""Weights in int8 with scales: half the bytes of bfloat16 to be read.

A weight [m, k] is q * scale, in groups of k / G columns: q [m, k] int8, scale [m, G]
float32. A product rounds its rows in the same way, by row and group, and adds up exact
integers within a group, by a kernel where there is one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import (
    by_platform,
    counts,
    skinny_product_int8,
    unsupported,
)
from stree_jax.models.serialization import register_for_export
from stree_jax.models.weights.plain import GPU_LEAST
from stree_jax.models.weights.weight import BFLOAT16, Format, Weight

LARGEST = 127  # of q, either sign
LEAST = 1e-30  # a group whose largest number is below is 0; src/int8_body.h has it too
# Columns of a weight that share a scale: bench/RESULTS.md, "int8 weights".
GROUP = 128


@dataclass(frozen=True)
class Int8Format(Format):
    """Matrices in int8, all else in bfloat16.

    Attributes:
      group: about how many columns share a scale. If None, a row has one scale.
    """

    name: str = "int8"
    dtype: np.dtype = BFLOAT16
    group: int | None = GROUP

    def store(self, matrix: Any, columns: int | None = None) -> "Quantized":
        whole = matrix.shape[1] if columns is None else columns
        size = None if self.group is None else group_of(whole, self.group)
        return _quantized(matrix, size)


INT8 = Int8Format()


def group_of(columns: int, group: int = GROUP) -> int | None:
    """Returns the largest divisor of the columns that is half to all of a group, or
    None if there is no such divisor, so that the whole row has one scale."""
    sizes = range(min(group, columns), group // 2 - 1, -1)
    return next((n for n in sizes if n and columns % n == 0), None)


@struct.dataclass
class Quantized(Weight):
    """A weight in int8.

    Attributes:
      q: [m, k] int8.
      scale: [m, G] float32; G divides k, 1 is a scale an output channel.
    """

    q: jax.Array
    scale: jax.Array

    @property
    def format(self) -> Int8Format:
        return INT8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return unsupported(rows, self.q, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Rounds the rows to int8, too; sums within a group are exact."""
        return by_platform(
            *(rows.astype(jnp.float32), self.q, self.scale, counts(valid_count)),
            cpu=_native if native else _definition,
            cuda=_cuda,
            default=_definition,
        )

    def rows(self, ids: jax.Array) -> jax.Array:
        q, scale = self.q[ids], self.scale[ids]
        parts = q.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
        return parts.reshape(q.shape)


register_for_export(Quantized)


@partial(jax.jit, static_argnums=1)  # or each step of it would be an array
def _quantized(weight: jax.Array, group: int | None) -> Quantized:
    return quantize(weight, group)


def _native(*arrays: jax.Array) -> jax.Array:
    return skinny_product_int8(*arrays, definition=_definition)


def _definition(*arrays: jax.Array) -> jax.Array:
    return int8_product(*arrays[:3])


def _cuda(*arrays: jax.Array) -> jax.Array:
    return int8_product_cuda(*arrays[:3])


def quantize(weight: jax.Array, group: int | None = None) -> Quantized:
    """Rounds a matrix to the nearest int8 numbers.

    Args:
      weight: [m, k] of any float dtype.
      group: columns of a row that share a scale. If None, all k share one.

    Raises:
      ValueError: groups of this size do not fill k columns.
    """
    k = weight.shape[1]
    size = k if group is None else group
    if size < 1 or k % size:
        raise ValueError(f"groups of {size} columns do not fill {k}")
    return Quantized(*rounded(weight, k // size))


def rounded(x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Rounds x [n, k] to q [n, k] int8 with scale [n, G] float32, ties to even.

    A group that contains NaN or infinity gets scale NaN, so the fault stays visible.
    """
    parts = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    most = jnp.abs(parts).max(axis=-1, keepdims=True)
    counts = (most >= LEAST) & (most < jnp.inf)
    inverse = jnp.where(counts, LARGEST / jnp.where(counts, most, 1.0), 0.0)
    q = jnp.round(jnp.where(counts, parts * inverse, 0.0)).astype(jnp.int8)
    zero = jnp.where(jnp.isfinite(most), 0.0, jnp.nan)
    scale = jnp.where(counts, most / LARGEST, zero)
    return q.reshape(x.shape), scale[..., 0]


def int8_product(rows: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes rows @ (weight * scale).T in plain JAX, the rows rounded to int8.

    Args:
      rows: [t, k] float32.
      weight, scale: q [m, k] and scale [m, G] of a `Quantized`.

    Returns:
      [t, m] float32.
    """
    t, k = rows.shape
    m, groups = scale.shape
    size = k // groups
    # XLA:CPU streams int8 from two rows on.
    q, row_scale = rounded(jnp.pad(rows, ((0, max(2 - t, 0)), (0, 0))), groups)

    def add(g: jax.Array, total: jax.Array) -> jax.Array:
        left, right = (
            lax.dynamic_slice_in_dim(z, g * size, size, 1) for z in (weight, q)
        )
        sums = jnp.einsum("mk,tk->mt", left, right, preferred_element_type=jnp.int32)
        scales = (lax.dynamic_slice_in_dim(z, g, 1, 1) for z in (scale, row_scale))
        left_scale, right_scale = scales
        return total + sums.astype(jnp.float32) * (left_scale * right_scale.T)

    zero = jnp.zeros((m, q.shape[0]), jnp.float32)
    total = (
        add(jnp.int32(0), zero) if groups == 1 else lax.fori_loop(0, groups, add, zero)
    )
    return total[:, :t].T


def int8_product_cuda(
    rows: jax.Array, weight: jax.Array, scale: jax.Array
) -> jax.Array:
    """Computes `int8_product` on a GPU: bfloat16 holds every int8, and float32 their
    sums.

    For int8 factors with two rows XLA gives wrong sums there (jax 0.11.2, an H200), and
    group by group it takes 176 us where all groups at once take 23 (10576 x 2560).
    Sums are exact up to 1,040 columns a group.
    """
    t, groups = rows.shape[0], scale.shape[1]
    padded = jnp.pad(rows, ((0, max(GPU_LEAST - t, 0)), (0, 0)))
    q, row_scale = rounded(padded, groups)
    left, right = (
        z.astype(jnp.bfloat16).reshape(z.shape[0], groups, -1) for z in (weight, q)
    )
    sums = jnp.einsum("mgk,tgk->gmt", left, right, preferred_element_type=jnp.float32)
    total = (sums * scale.T[:, :, None] * row_scale.T[:, None, :]).sum(axis=0)
    return total[:, :t].T
