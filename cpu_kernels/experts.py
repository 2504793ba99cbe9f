"""Supported arguments of the kernels for products with the matrices of experts.

The code is in `src/experts_ffi.cc`: it sorts rows by expert and calls the kernels of
`product.py` and `panels.py`. Matrices of experts that no row chose are not read. A
row's result does not depend on the other rows or the number of threads, bit for bit.
"""

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.product import MAX_INT8_GROUP


def experts_unsupported(
    rows: jax.Array, chosen: jax.Array, weight: jax.Array
) -> str | None:
    """Returns why the kernel does not support the products. None if it does.

    Args:
      rows: [n, k].
      chosen: [n * r] int32: result i is of row i // r and expert chosen[i]. If there is
        no such expert, the result is not written.
      weight: [E, m, k], or panels [E, P, tiles, nbytes] uint8.
    """
    if 0 in (rows.size, chosen.size, weight.size):
        return "wants arrays that are not empty"
    if chosen.dtype != jnp.int32:
        return f"wants int32 experts, got {chosen.dtype}"
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8):
        return f"wants float32, bfloat16, int8 or panels, got {weight.dtype}"
    return None


def experts_int8_unsupported(
    rows: jax.Array, chosen: jax.Array, weight: jax.Array, scale: jax.Array
) -> str | None:
    """Returns `experts_unsupported` for matrices [E, m, k] int8 with scales
    [E, m, G]."""
    if rows.shape[1] > scale.shape[2] * MAX_INT8_GROUP:
        return f"wants groups of at most {MAX_INT8_GROUP} columns"
    return experts_unsupported(rows, chosen, weight)
