"""Rounding to fewer bits that no compiler optimization can remove."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def rounded_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds x to `dtype`, always.

    XLA may remove a conversion to bfloat16 and back when it fuses both ("excess
    precision"), depending on the program. On a GPU it removed it in plain decoding
    steps but not before a kernel, so the logits of a tree differed from those of plain
    decoding. XLA never removes `reduce_precision`.
    """
    if jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        kept = jnp.finfo(dtype)
        x = lax.reduce_precision(x, kept.nexp, kept.nmant)
    return x.astype(dtype)
