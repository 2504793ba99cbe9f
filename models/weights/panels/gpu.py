"""Products with panels on a GPU.

Up to 64 rows are multiplied by a Triton kernel. Without it, all blocks of columns are
one batched product of exact integers, scaled and summed outside. More rows are
multiplied by the decoded matrix. Rows are rounded as in the definition (`product.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.weights.panels.kind import BLOCK, PanelKind
from stree_jax.models.weights.panels.product import rounded
from stree_jax.models.weights.plain import MIN_GPU_ROWS

# Maximum number of input rows for `batched_product`. It stores a float32 sum for each
# input row, row of the matrix and block of 32 columns. With more input rows, these sums
# would take more memory than the decoded matrix of `decoded_product`.
MAX_BATCHED_ROWS = 16


def gpu_product(
    rows: jax.Array, panels: jax.Array, kind: PanelKind, planes: int
) -> jax.Array:
    """Computes `product.panel_product` in the way that is best for the number of input
    rows; see the module's docstring."""
    # Importing Triton takes 0.1 s; only programs for GPUs need it.
    from stree_jax.models.weights.panels import triton

    if triton.unsupported(rows, panels, kind, planes) is None:
        return triton.panel_product(rows, panels, kind, planes)
    form = batched_product if rows.shape[0] <= MAX_BATCHED_ROWS else decoded_product
    return form(rows, panels, kind, planes)


def batched_product(
    rows: jax.Array, panels: jax.Array, kind: PanelKind, planes: int
) -> jax.Array:
    """Computes `panel_product` with all blocks in one product.

    bfloat16 represents the integers of rows and of the matrix exactly, and the sums of
    a block are exact in float32.
    """
    t, k = rows.shape
    x = rounded(rows, planes)
    width = min(kind.block, BLOCK)
    w = kind.decode(panels)
    m, blocks = panels.shape[0] * w.q.shape[1], k // width
    q = w.q.astype(jnp.bfloat16).reshape(m, blocks, width)
    left = jnp.concatenate(x.planes).astype(jnp.bfloat16)
    missing = max(MIN_GPU_ROWS - len(left), 0)
    left = jnp.pad(left, ((0, missing), (0, 0))).reshape(-1, blocks, width)
    sums = jnp.einsum("mbk,tbk->bmt", q, left, preferred_element_type=jnp.float32)
    sums = _whole([sums[..., i * t :][..., :t] for i in range(planes)])
    scale = _by_block(w.scale, m, blocks)
    row_scale = jnp.repeat(x.scale, blocks // x.scale.shape[1], axis=1).T[:, None]
    y = sums * scale[..., None]
    if w.minimum is not None:
        of_row = _whole([z.reshape(t, blocks, width).sum(axis=-1) for z in x.planes])
        y = y + of_row.T[:, None] * _by_block(w.minimum, m, blocks)[..., None]
    return (y * row_scale).sum(axis=0).T


def decoded_product(
    rows: jax.Array,
    panels: jax.Array,
    kind: PanelKind,
    planes: int,
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
) -> jax.Array:
    """Computes `panel_product` with the decoded matrix, both in float32."""
    t, k = rows.shape
    x = rounded(rows, planes)
    q = _whole(x.planes).reshape(t, x.scale.shape[1], -1)
    left = (q * x.scale[..., None]).reshape(t, k)
    matrix = kind.decode(panels).matrix().reshape(-1, k)
    return jnp.einsum("tk,mk->tm", left, matrix, precision=precision)


def _whole(planes: list[jax.Array] | tuple[jax.Array, ...]) -> jax.Array:
    """Returns the integers that one or two planes represent, or the same for sums of
    planes: planes[0], or 256 planes[0] + planes[1]."""
    return planes[0] if len(planes) == 1 else 256 * planes[0] + planes[1]


def _by_block(scale: jax.Array, m: int, blocks: int) -> jax.Array:
    """Returns the scales [P, 16, n, ...] of a matrix's panels as [blocks, m]. A scale
    of several blocks is repeated."""
    rows = scale.reshape(m, -1)
    return jnp.repeat(rows, blocks // rows.shape[1], axis=1).T
