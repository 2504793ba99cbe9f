"""Attention of tree nodes to the cache and to each other: `src/attention_body.h`.

What it computes is defined by `pallas_kernels.attention.tree_attention`, with its axes.
The cache is read once, up to each row's length, by blocks of 64 keys; long ones are cut
into parts that the threads share, at places that only the length decides. A query has
the same bits whatever rows of the batch, threads and capacity there are, and whatever
other queries, up to six of a head of keys, or from seven on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.native_call import MoreRows, native_call

MOST_WIDE = 512  # channels of a head


def attention_unsupported(q: jax.Array, k_cache: jax.Array, scale: float) -> str | None:
    """Why `tree_attention` cannot take q [B, Tq, Hq, hd] and such a cache, or None."""
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if isinstance(scale, jax.Array):
        return "wants a scale that is a number, not an array"
    if 0 in k_cache.shape:
        return f"wants a cache that is not empty, got {k_cache.shape}"
    if 0 in q.shape or q.shape[-1] > MOST_WIDE:
        return f"wants heads of 1 to {MOST_WIDE} channels, got q {q.shape}"
    if k_cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants caches in float32 or bfloat16, got {k_cache.dtype}"
    return None


def tree_attention(
    *arrays: jax.Array, scale: float, definition: Callable[..., Any]
) -> jax.Array:
    """[B, Tq, Hq, hd] float32.

    Args:
      arrays: q in float32, k, v, k_cache, v_cache, length, mask, see above; bfloat16
        as uint16 of the same bits.
      scale: softmax scale.
      definition: of the same arrays.
    """
    allowed = level()
    if allowed is None:
        raise ValueError("tree_attention: there are no compiled kernels")
    kernel = Kernel(float(scale))
    (out,) = native_call(
        *arrays,
        kernel=kernel,
        definition=definition,
        batched=MoreRows(kernel),
        level=allowed,
    )
    return out


@dataclass(frozen=True)
class Kernel:
    """The compiled kernel, as a function of all arrays."""

    scale: float

    def __call__(self, *arrays: jax.Array, level: int) -> jax.Array:
        shape = jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)
        call = jax.ffi.ffi_call("stree_attention", shape)
        return call(*arrays, scale=np.float32(self.scale), level=np.int64(level))
