"""Products of a few rows with a weight, which is read once: `src/product_body.h`, and
`src/amx.cc` and `src/amx_float32.cc` by tiles.

| weight | rows become | sums | by |
| --- | --- | --- | --- |
| float32 [m, k] | float32 | float32 | FMA; AMX for large ones, by parts in bfloat16 |
| bfloat16 [m, k] | bfloat16, to the nearest | float32 | AMX, AVX512-BF16, or FMA |
| int8 [m, k], scales [m, G] | int8, scaled by group | int32, float32 | AMX, VNNI |

A row's result has the same bits whatever rows stand beside it and however many threads
there are; with other instructions it may have others.
"""

import jax
import jax.numpy as jnp

MOST_ROWS = 64  # of a product that is bound by reading its weight
MOST_ROOM = 1024  # rows of a product that knows how many of them are tokens
MOST_INT8 = 2**16  # columns of a group of int8, whose sums fit in int32


def product_unsupported(
    rows: jax.Array, weight: jax.Array, live: jax.Array | None
) -> str | None:
    """Returns why the kernel cannot take rows [t, k] and a weight [m, k], or None.

    Args:
      live: [B] int32, how many of the t / B rows in each batch row are tokens. Results
        of the others are not written. More than 64 tokens read the weight again for
        every 64. If None, all rows are tokens.
    """
    (t, k), most = rows.shape, MOST_ROWS if live is None else MOST_ROOM
    if not 1 <= t <= most:
        return f"wants 1 to {most} rows, got {t}"
    if k < 1 or weight.shape[0] < 1:
        return f"wants a weight that is not empty, got {weight.shape}"
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
        return f"wants a weight in float32, bfloat16 or int8, got {weight.dtype}"
    return None


def int8_unsupported(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, live: jax.Array | None
) -> str | None:
    """`product_unsupported` of a weight [m, k] int8 with scales [m, G]."""
    if rows.shape[1] > scale.shape[1] * MOST_INT8:
        return f"wants groups of {MOST_INT8} at most"
    return product_unsupported(rows, weight, live)
