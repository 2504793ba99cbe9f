"""The gated rows of an MLP, silu(gate) * up: `src/gate_ffi.cc`.

A row has the same bits whatever stands beside it, with any number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.native_call import called, counts


def silu_gated(
    h: jax.Array,
    multiplier: float,
    live: jax.Array | None = None,
    *,
    definition: Callable[..., jax.Array],
) -> jax.Array:
    """silu(multiplier * gate) * up of h [..., 2 f], gate and up: [..., f] float32.

    Args:
      live: see `native_call.counts`.
      definition: of h and counts; what runs where no kernel can.
    """
    (out,) = called(
        *(h, counts(live)),
        kernel=Kernel(multiplier),
        definition=definition,
        fits=h.dtype == jnp.float32 and h.ndim > 1 and h.shape[-1] % 2 == 0,
    )
    return out


@dataclass(frozen=True)
class Kernel:
    """The compiled kernel, of h and counts."""

    multiplier: float

    def __call__(self, h: jax.Array, live: jax.Array, *, level: int) -> jax.Array:
        out = jax.ShapeDtypeStruct((*h.shape[:-1], h.shape[-1] // 2), jnp.float32)
        call = jax.ffi.ffi_call("stree_gate", out)
        return call(
            h, live, multiplier=np.float32(self.multiplier), level=np.int64(level)
        )
