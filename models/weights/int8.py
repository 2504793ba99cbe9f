"""Weights in int8 with scales: half the bytes of bfloat16 to be read.

A weight [m, k] is q * scale, in groups of k / G columns: q [m, k] int8, scale [m, G]
float32. A product rounds its rows in the same way, by row and group, and adds up exact
integers within a group; `models.linear` runs it by a kernel where there is one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

INT8 = np.dtype(np.int8)  # a dtype of weights, not of arrays: see `params.stored`
LARGEST = 127  # of q, either sign
GPU_LEAST = 16  # rows of a product of 8 or 16 bits on a GPU, where there are few
LEAST = 1e-30  # a group whose largest number is below is 0; src/int8_body.h has it too


@struct.dataclass
class Quantized:
    """A weight [m, k] or a table of m rows; a pytree, whose leaves keep axis m first.

    Attributes:
      q: [m, k] int8.
      scale: [m, G] float32; G divides k, 1 is a scale an output channel.
    """

    q: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    @property
    def dtype(self) -> Any:
        return self.q.dtype

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows [..., k] float32 of a table, as an embedding is looked up."""
        q, scale = self.q[ids], self.scale[ids]
        parts = q.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
        return parts.reshape(q.shape)


def quantize(weight: jax.Array, group: int | None = None) -> Quantized:
    """To the nearest, by output channel, or by `group` columns of one.

    Args:
      weight: [m, k] of any float dtype.
      group: columns that share a scale; None for all k.

    Raises:
      ValueError: groups of this size do not fill k columns.
    """
    k = weight.shape[1]
    size = k if group is None else group
    if size < 1 or k % size:
        raise ValueError(f"groups of {size} columns do not fill {k}")
    return Quantized(*rounded(weight, k // size))


def rounded(x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """q [n, k] int8 and scale [n, G] float32 of x [n, k], ties to even.

    A group with a number that is none has the scale NaN.
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
    """rows @ (weight * scale).T in plain JAX, the rows rounded to int8.

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
    """`int8_product` for a GPU: bfloat16 holds every int8, and float32 their sums.

    Of int8 factors with two rows XLA gives wrong sums there (jax 0.11.2, an H200), and
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
