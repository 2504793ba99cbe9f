"""Numbers rounded to fewer bits, whatever a compiler makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def rounded_to(x: jax.Array, dtype: Any) -> jax.Array:
    """x in `dtype`, and no bit more.

    XLA may leave out a conversion to bfloat16 and back where it fuses both ("excess
    precision"), and whether it does depends on the program. On a GPU it did in plain
    steps and not in front of a kernel, so that a tree's logits were not plain
    decoding's. `reduce_precision` is never left out.
    """
    if jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        kept = jnp.finfo(dtype)
        x = lax.reduce_precision(x, kept.nexp, kept.nmant)
    return x.astype(dtype)
