"""int8 weights with scales, which halve the bytes read compared with bfloat16.

A weight [m, k] is stored as q [m, k] int8 and scale [m, G] float32; each group of k / G
columns of a row shares a scale. A product quantizes its input rows in the same way, per
row and group, and sums exact integers within a group. CPU kernels compute it if they
are available.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import (
    by_platform,
    cpu_kernel,
    experts_int8_unsupported,
    int8_unsupported,
)
from stree_jax.models.base.derivative import with_derivative
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.experts import Experts, chosen_rows, chosen_shape
from stree_jax.models.weights.int8_format import INT8, Int8Format
from stree_jax.models.weights.plain import (
    MIN_GPU_ROWS,
    in_float32,
    in_pool_thread,
    product_shape,
)
from stree_jax.models.weights.weight import Weight

MAX_Q = 127  # q is from -MAX_Q to MAX_Q
# A group whose largest magnitude is below this becomes 0; same as in src/int8_body.h.
MIN_GROUP_MAX = 1e-30


@struct.dataclass
class Quantized(Weight):
    """A weight in int8.

    Attributes:
      q: [m, k] int8.
      scale: [m, G] float32; G divides k. With G = 1 each output channel has one scale.
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
        return _product.unsupported(rows, self.q, self.scale, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T with the rows quantized to int8 as well.

        Sums within a group are exact.
        """
        args = rows, self.q, self.scale, valid_count
        cpu = _product if native else _product.definition
        return by_platform(*args, cpu=cpu, cuda=_cuda, default=_product.definition)

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        return _chosen.unsupported(rows, chosen, self.q, self.scale)

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        compute = _chosen if native else _chosen.definition
        return compute(rows, chosen, self.q, self.scale)

    def rows(self, ids: jax.Array) -> jax.Array:
        return in_pool_thread(dequantized(self.q[ids], self.scale[ids]))


register_for_export(Quantized)


def stored_int8(matrix: Any, group: int | None) -> Quantized | Experts:
    """Stores a matrix [m, k], or those of experts [E, m, k]; see `_quantized`."""
    stored = _quantized(matrix, group)
    return stored if matrix.ndim == 2 else Experts(stored)


@partial(jax.jit, static_argnums=1)  # without jit every operation would make an array
def _quantized(weight: jax.Array, group: int | None) -> Quantized:
    """Quantizes a matrix [m, k], or the matrices [E, m, k] of experts one by one."""
    if weight.ndim == 2:
        return quantize(weight, group)
    return lax.map(partial(quantize, group=group), weight)


@cpu_kernel(
    "stree_product_int8",
    outputs=product_shape,
    unsupported=int8_unsupported,
    shared=("weight", "scale"),
    prepare=in_float32,
)
def _product(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, valid_count: jax.Array | None
) -> jax.Array:
    """Computes rows [t, k] @ (weight * scale).T with the rows quantized to int8."""
    return int8_product(rows.astype(jnp.float32), weight, scale)


@cpu_kernel(
    "stree_experts_int8",
    outputs=chosen_shape,
    unsupported=experts_int8_unsupported,
    shared=("weight", "scale"),
    prepare=in_float32,
)
def _chosen(
    rows: jax.Array, chosen: jax.Array, weight: jax.Array, scale: jax.Array
) -> jax.Array:
    """Computes products with the chosen of the matrices weight * scale [E, m, k]."""

    def product(rows: jax.Array, expert: Quantized) -> jax.Array:
        return expert.product(rows, None, native=False)

    return chosen_rows(rows, chosen, Quantized(weight, scale), product)


def _cuda(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, _: jax.Array | None
) -> jax.Array:
    return int8_product_cuda(rows.astype(jnp.float32), weight, scale)


def quantize(weight: jax.Array, group: int | None = None) -> Quantized:
    """Quantizes a matrix to int8.

    Args:
      weight: [m, k] of any float dtype.
      group: columns of a row that share a scale. If None, all k columns share one.

    Raises:
      ValueError: k is not a multiple of `group`.
    """
    k = weight.shape[1]
    size = k if group is None else group
    if size < 1 or k % size:
        raise ValueError(f"groups of {size} columns do not fill {k}")
    return Quantized(*rounded(weight, k // size))


def rounded(x: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Quantizes rows to int8, ties to even.

    A group that contains NaN or infinity gets scale NaN, so the fault stays visible.

    Args:
      x: [n, k] of any float dtype.
      groups: G, number of groups of columns.

    Returns:
      q [n, k] int8 and scale [n, G] float32.
    """
    parts = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    group_max = jnp.abs(parts).max(axis=-1, keepdims=True)
    is_normal = (group_max >= MIN_GROUP_MAX) & (group_max < jnp.inf)
    inverse = jnp.where(is_normal, MAX_Q / jnp.where(is_normal, group_max, 1.0), 0.0)
    q = jnp.round(jnp.where(is_normal, parts * inverse, 0.0)).astype(jnp.int8)
    zero_or_nan = jnp.where(jnp.isfinite(group_max), 0.0, jnp.nan)
    scale = jnp.where(is_normal, group_max / MAX_Q, zero_or_nan)
    return q.reshape(x.shape), scale[..., 0]


def dequantized(q: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns rows [..., k] float32 from their q [..., k] int8 and scale [..., G]."""
    parts = q.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
    return parts.reshape(q.shape)


def _exact(rows: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes `int8_product` without rounding the rows."""
    matrix = dequantized(weight, scale)
    return jnp.einsum("tk,mk->tm", rows, matrix, precision=lax.Precision.HIGHEST)


def int8_product(rows: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes rows @ (weight * scale).T in plain JAX, with the rows quantized to int8.
    The derivative is that of rows which are not quantized.

    Args:
      rows: [t, k] float32.
      weight: [m, k] int8, `Quantized.q`.
      scale: [m, G] float32, `Quantized.scale`.

    Returns:
      [t, m] float32.
    """
    return with_derivative(_integer_product, _exact)(rows, weight, scale)


def _integer_product(rows: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    t, k = rows.shape
    m, groups = scale.shape
    size = k // groups
    # XLA:CPU reads an int8 weight at memory speed only with two or more rows.
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
    """Computes `int8_product` on a GPU, in bfloat16 with float32 sums.

    bfloat16 represents every int8 exactly, and the sums are exact for groups of up to
    1,040 columns. An int8 product is not an option: with two rows XLA:GPU returns wrong
    sums (jax 0.11.2, H200). All groups run in one product, because group by group it
    takes 176 us instead of 23 us (weight of 10576 x 2560, H200).
    """
    t, groups = rows.shape[0], scale.shape[1]
    padded = jnp.pad(rows, ((0, max(MIN_GPU_ROWS - t, 0)), (0, 0)))
    q, row_scale = rounded(padded, groups)
    left, right = (
        z.astype(jnp.bfloat16).reshape(z.shape[0], groups, -1) for z in (weight, q)
    )
    sums = jnp.einsum("mgk,tgk->gmt", left, right, preferred_element_type=jnp.float32)
    total = (sums * scale.T[:, :, None] * row_scale.T[:, None, :]).sum(axis=0)
    return total[:, :t].T
