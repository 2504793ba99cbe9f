"""The definition of products with panels.

A product rounds its input rows to integers in groups of columns: to 16 bits, as two
planes of int8, or to 8 bits. Sums over a block of the weight are then exact integers.
They are multiplied by the block's scale and added in the order of the columns, so that
a row's result does not depend on other rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.base.derivative import with_derivative
from stree_jax.models.weights.panels.kind import BLOCK, LANES, PanelKind

MAX_GROUP = 256  # most columns of a row that share a scale
# A group whose largest magnitude is below this becomes 0; as in src/panels.h.
MIN_GROUP_MAX = 1e-30
LARGEST = {1: 127, 2: 127 * 256}  # largest integer of a row, by planes


class Rounded(NamedTuple):
    """Rows as integers times scales.

    Attributes:
      planes: [t, k] float32 each, integers from -128 to 127. With two planes, the
        integers of the row are 256 * planes[0] + planes[1].
      scale: [t, G] float32, a scale for each group of k / G columns.
    """

    planes: tuple[jax.Array, ...]
    scale: jax.Array


def group_size(k: int, planes: int) -> int:
    """Returns the columns of a row [k] that share a scale: 32 with one plane, else the
    largest multiple of 32 up to 256 that divides k."""
    sizes = range(MAX_GROUP if planes == 2 else BLOCK, 0, -BLOCK)
    return next(size for size in sizes if k % size == 0)


def rounded(rows: jax.Array, planes: int) -> Rounded:
    """Rounds rows [t, k] float32 to integers, ties to even.

    A group that contains NaN or infinity gets scale NaN, so the fault stays visible.
    """
    t, k = rows.shape
    parts = rows.reshape(t, -1, group_size(k, planes))
    most = jnp.abs(parts).max(axis=-1, keepdims=True)
    is_normal = (most >= MIN_GROUP_MAX) & (most < jnp.inf)
    largest = jnp.float32(LARGEST[planes])
    inverse = jnp.where(is_normal, largest / jnp.where(is_normal, most, 1.0), 0.0)
    q = jnp.round(jnp.where(is_normal, parts * inverse, 0.0))
    zero_or_nan = jnp.where(jnp.isfinite(most), 0.0, jnp.nan)
    scale = jnp.where(is_normal, most / largest, zero_or_nan)[..., 0]
    q = q.reshape(t, k)
    if planes == 1:
        return Rounded((q,), scale)
    high = jnp.floor((q + 128) / 256)
    return Rounded((high, q - 256 * high), scale)


def _exact(kind: PanelKind, rows: jax.Array, panels: jax.Array) -> jax.Array:
    """Computes `panel_product` without rounding the rows."""
    matrix = kind.decode(panels).matrix().reshape(-1, rows.shape[1])
    return jnp.einsum("tk,mk->tm", rows, matrix, precision=lax.Precision.HIGHEST)


def panel_product(
    rows: jax.Array, panels: jax.Array, kind: PanelKind, planes: int
) -> jax.Array:
    """Computes rows @ matrix.T. The derivative is that of rows which are not rounded.

    Args:
      rows: [t, k] float32.
      panels: [P, n, nbytes] uint8; n tiles have k columns.
      kind: the kind of the panels.
      planes: 2 to round the rows to 16 bits, 1 to 8 bits.

    Returns:
      [t, 16 P] float32.
    """
    product = with_derivative(
        partial(_integer_product, kind, planes), partial(_exact, kind)
    )
    return product(rows, panels)


def _integer_product(
    kind: PanelKind, planes: int, rows: jax.Array, panels: jax.Array
) -> jax.Array:
    t, k = rows.shape
    x = rounded(rows, planes)
    per_group = k // x.scale.shape[1] // BLOCK  # blocks of 32 columns
    width = min(kind.block, BLOCK)  # columns of an integer sum
    steps = kind.tile // BLOCK

    def tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple:
        total, part = carry
        w = kind.decode(lax.dynamic_slice_in_dim(panels, i, 1, axis=1))
        q = w.q.reshape(-1, kind.tile // width, width)  # [16 P, blocks, columns]
        repeats = max(1, kind.tile // width // w.scale.shape[-1])

        def by_block(z: jax.Array) -> jax.Array:
            return jnp.repeat(z.reshape(q.shape[0], -1), repeats, axis=1)

        some = [
            lax.dynamic_slice_in_dim(z, i * kind.tile, kind.tile, axis=1)
            for z in x.planes
        ]
        parts = [z.reshape(t, -1, width) for z in some]
        dots = [_dots(z, q) for z in parts]  # [blocks, t, 16 P], exact integers
        sums = dots[0] if planes == 1 else 256 * dots[0] + dots[1]
        sums = sums * by_block(w.scale).T[:, None]
        if w.minimum is not None:
            of_rows = [z.sum(axis=-1).T for z in parts]
            of_row = of_rows[0] if planes == 1 else 256 * of_rows[0] + of_rows[1]
            sums = sums + of_row[..., None] * by_block(w.minimum).T[:, None]
        for j in range(steps):
            for s in range(BLOCK // width):
                part = part + sums[j * BLOCK // width + s]
            done = i * steps + j + 1
            ends = done % per_group == 0
            scale = lax.dynamic_slice_in_dim(x.scale, (done - 1) // per_group, 1, 1)
            total = jnp.where(ends, total + part * scale, total)
            part = jnp.where(ends, 0.0, part)
        return total, part

    zero = jnp.zeros((t, panels.shape[0] * LANES), jnp.float32)
    return lax.fori_loop(0, panels.shape[1], tile, (zero, zero))[0]


def _dots(x: jax.Array, q: jax.Array) -> jax.Array:
    """Computes the sums [blocks, t, m] over the columns of each block.

    Args:
      x: [t, blocks, columns], integers.
      q: [m, blocks, columns], integers.
    """
    precision = lax.Precision.HIGHEST
    return jnp.einsum("tbk,mbk->btm", x, q, precision=precision)
