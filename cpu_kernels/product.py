"""Supported arguments of the product kernels: few rows times a weight that is read
once.

The code is in `src/product_body.h`, and for AMX tiles in `src/amx.cc` and
`src/amx_float32.cc`.

| weight | rows are converted to | sums | instructions |
| --- | --- | --- | --- |
| float32 [m, k] | float32 | float32 | FMA; AMX for large weights, in bfloat16 parts |
| bfloat16 [m, k] | bfloat16, nearest | float32 | AMX, AVX512-BF16 or FMA |
| int8 [m, k], scales [m, G] | int8, scaled by group | int32, float32 | AMX or VNNI |

A row's result does not depend on the other rows or the number of threads, bit for bit.
It may differ between instruction sets.
"""

import jax
import jax.numpy as jnp

MAX_INT8_GROUP = 2**16  # columns of an int8 group, so that sums fit in int32


def product_unsupported(
    rows: jax.Array, weight: jax.Array, valid_count: jax.Array | None
) -> str | None:
    """Returns why the kernel does not support the product. None if it does.

    Args:
      rows: [t, k].
      weight: [m, k].
      valid_count: [B] int32. Of the t / B rows of each batch row, the first valid_count
        are valid; results of the rest are not written. The weight is read once per 64
        valid rows. If None, all rows are valid.
    """
    t, k = rows.shape
    if t < 1:
        return "wants at least one row"
    if k < 1 or weight.shape[0] < 1:
        return f"wants a weight that is not empty, got {weight.shape}"
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
        return f"wants a weight in float32, bfloat16 or int8, got {weight.dtype}"
    return None


def int8_unsupported(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, valid_count: jax.Array | None
) -> str | None:
    """Returns `product_unsupported` for a weight [m, k] int8 with scales [m, G]."""
    if rows.shape[1] > scale.shape[1] * MAX_INT8_GROUP:
        return f"wants groups of at most {MAX_INT8_GROUP} columns"
    return product_unsupported(rows, weight, valid_count)
