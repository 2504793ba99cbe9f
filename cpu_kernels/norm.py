"""Rows over their root mean square, times a scale: `src/norm_ffi.cc`.

XLA makes four operations of it, each compiled and run by itself. A row has the same
bits whatever stands beside it, with any number of threads, and on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.native_call import MoreRows, counts, native_call

SHARED = (1,)  # the scale's place


def norm_unsupported(x: jax.Array, scale: jax.Array) -> str | None:
    """Why `scaled_norm` cannot take x [..., d] and a scale [d], or None."""
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if x.ndim < 2 or x.size == 0:
        return f"wants rows [..., d] that are not empty, got {x.shape}"
    if scale.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants a scale in float32 or bfloat16, got {scale.dtype}"
    return None


def scaled_norm(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    live: jax.Array | None = None,
    *,
    definition: Callable[..., jax.Array],
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, of every row of x.

    Args:
      x: [..., d] of any float dtype, with two axes or more.
      scale: [d] float32 or bfloat16.
      live: see `native_call.counts`.
      definition: of x in float32, the scale and counts; what runs where no kernel can.

    Returns:
      [..., d] float32.

    Raises:
      ValueError: there is no kernel for these, see `norm_unsupported`.
    """
    reason, allowed = norm_unsupported(x, scale), level()
    if reason is not None or allowed is None:
        raise ValueError(f"scaled_norm: {reason}")
    kernel = Kernel(eps)
    (out,) = native_call(
        *(x.astype(jnp.float32), scale, counts(live)),
        kernel=kernel,
        definition=definition,
        batched=MoreRows(kernel, SHARED),
        level=allowed,
    )
    return out


@dataclass(frozen=True)
class Kernel:
    """The compiled kernel, of x, scale and counts."""

    eps: float

    def __call__(
        self, x: jax.Array, scale: jax.Array, live: jax.Array, *, level: int
    ) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jax.ffi.ffi_call("stree_norm", out)(
            x, scale, live, eps=np.float32(self.eps)
        )
