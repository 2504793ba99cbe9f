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

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.native_call import MoreRows, counts, native_call

MOST_ROWS = 64  # of a product that is bound by reading its weight
MOST_ROOM = 1024  # rows that there is room for where it is said how many there are
MOST_INT8 = 2**16  # columns of a group of int8, whose sums fit in int32

Definition = Callable[..., jax.Array]  # of rows [t, k] and the weight's arrays


def unsupported(
    rows: jax.Array, weight: jax.Array, live: jax.Array | None = None
) -> str | None:
    """Why `skinny_product` cannot take rows [t, k] and a weight [m, k], or None."""
    (t, k), most = rows.shape, MOST_ROWS if live is None else MOST_ROOM
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if not 1 <= t <= most:
        return f"wants 1 to {most} rows, got {t}"
    if k < 1 or weight.shape[0] < 1:
        return f"wants a weight that is not empty, got {weight.shape}"
    if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
        return f"wants a weight in float32, bfloat16 or int8, got {weight.dtype}"
    return None


def skinny_product(
    rows: jax.Array,
    weight: jax.Array,
    live: jax.Array | None = None,
    *,
    definition: Definition,
) -> jax.Array:
    """rows @ weight.T by the compiled kernel, see above.

    Args:
      rows: [t, k] of any float dtype, t from 1 to 64.
      weight: [m, k] float32 or bfloat16.
      live: see `native_call.counts`; t is B T then, up to 1024, and more than 64 rows
        that there are read the weight again for every 64.
      definition: of float32 rows, the weight and counts; what runs where no kernel can.

    Returns:
      [t, m] float32.

    Raises:
      ValueError: there is no kernel for these, see `unsupported`.
    """
    return _checked(rows, weight, live=live, definition=definition)


def skinny_product_int8(
    rows: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    live: jax.Array | None = None,
    *,
    definition: Definition,
) -> jax.Array:
    """rows @ (weight * scale).T, of rows rounded to int8: `models.quantized`.

    Args:
      rows: [t, k] of any float dtype, t from 1 to 64.
      weight: [m, k] int8.
      scale: [m, G] float32, of the k / G columns of a group each.
      live, definition, returns, raises: as `skinny_product`.
    """
    if rows.shape[1] > scale.shape[1] * MOST_INT8:
        raise ValueError(f"skinny_product: wants groups of {MOST_INT8} at most")
    return _checked(rows, weight, scale, live=live, definition=definition)


def _checked(
    rows: jax.Array,
    weight: jax.Array,
    *scale: jax.Array,
    live: jax.Array | None,
    definition: Definition,
) -> jax.Array:
    reason, allowed = unsupported(rows, weight, live), level()
    if reason is not None or allowed is None:
        raise ValueError(f"skinny_product: {reason}")
    (out,) = native_call(
        *(rows.astype(jnp.float32), weight, *scale, counts(live)),
        kernel=_call,
        definition=definition,
        batched=MoreRows(_call, (1, 2)[: 1 + len(scale)], MOST_ROWS),
        level=allowed,
    )
    return out


def _call(
    rows: jax.Array, weight: jax.Array, *more: jax.Array, level: int
) -> jax.Array:
    shape = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32)
    target = "stree_product_int8" if len(more) > 1 else "stree_product"
    return jax.ffi.ffi_call(target, shape)(rows, weight, *more, level=np.int64(level))
