"""Attention of tree nodes to the cache and to each other: `src/attention_body.h`.

The kernel computes `pallas_kernels.attention.tree_attention`, with its axes. The cache
is read once, up to each row's length, by blocks of 64 keys; long ones are cut into
parts that the threads share, at places that only the length decides. A query has the
same bits whatever rows of the batch, threads and capacity there are, and whatever other
queries, up to six of a head of keys, or from seven on.
"""

import jax
import jax.numpy as jnp

MOST_WIDE = 512  # channels of a head


def attention_unsupported(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    *_: jax.Array,
    scale: float,
) -> str | None:
    """Returns why the kernel cannot take these arguments, or None if it can."""
    if isinstance(scale, jax.Array):
        return "wants a scale that is a number, not an array"
    if 0 in k_cache.shape:
        return f"wants a cache that is not empty, got {k_cache.shape}"
    if 0 in q.shape or q.shape[-1] > MOST_WIDE:
        return f"wants heads of 1 to {MOST_WIDE} channels, got q {q.shape}"
    if k_cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants caches in float32 or bfloat16, got {k_cache.dtype}"
    return None
