"""The heads of attention, cut, rotated and rounded: `src/heads_ffi.cc`.

XLA makes some eight operations of it, of which those that put rotated halves together
go number by number. Every number has the same bits whatever stands beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.native_call import called, counts


@dataclass(frozen=True)
class HeadOptions:
    """Hq heads of queries and Hk of keys, hd channels each; what keys are multiplied by
    before they are rotated; the dtype of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_multiplier: float
    dtype: Any


def turned_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    options: HeadOptions,
    live: jax.Array | None = None,
    *,
    definition: Callable[..., Any],
) -> list[jax.Array]:
    """q [B, T, Hq, hd] float32 and k, v [B, T, Hk, hd] of qkv [B, T, (Hq + 2 Hk) hd].

    Channels i and i + half of queries and keys are turned by their angle.

    Args:
      cos, sin: [B, T, half] float32, of the angles; half may be 0.
      live: see `native_call.counts`; keys and values of other rows are 0.
      definition: of the arrays, and counts; what runs where no kernel can.
    """
    known = options.dtype in (jnp.float32, jnp.bfloat16)
    return called(
        *(qkv, cos, sin, counts(live)),
        kernel=Kernel(options),
        definition=definition,
        fits=known and qkv.dtype == jnp.float32,
    )


@dataclass(frozen=True)
class Kernel:
    """The compiled kernel, of the arrays and counts."""

    options: HeadOptions

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        o, lead = self.options, arrays[0].shape[:2]
        q = jax.ShapeDtypeStruct((*lead, o.num_heads, o.head_dim), jnp.float32)
        k = jax.ShapeDtypeStruct((*lead, o.num_kv_heads, o.head_dim), o.dtype)
        call = jax.ffi.ffi_call("stree_heads", (q, k, k))
        return call(*arrays, key_multiplier=np.float32(o.key_multiplier))
