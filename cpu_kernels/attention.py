"""Supported arguments of the attention kernel (`src/attention_body.h`).

The kernel computes `pallas_kernels.attention.tree_attention`, with the same axes. It
reads the cache once, up to each row's length, in blocks of 64 keys. Threads share a
long text in parts of 1,024 places.

A query's result does not depend on the other rows of the batch, the number of threads
or the capacity of the cache, nor on which keys are in the cache yet, bit for bit.
"""

import jax
import jax.numpy as jnp

MAX_HEAD_DIM = 576  # channels of a head; latent attention has this many


def attention_unsupported(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    *_: jax.Array | None,
    scale: float,
) -> str | None:
    """Returns why the kernel does not support these arguments. None if it does."""
    if isinstance(scale, jax.Array):
        return "wants a scale that is a number, not an array"
    if 0 in k_cache.shape:
        return f"wants a cache that is not empty, got {k_cache.shape}"
    if 0 in q.shape or q.shape[-1] > MAX_HEAD_DIM:
        return f"wants heads of 1 to {MAX_HEAD_DIM} channels, got q {q.shape}"
    if k_cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants caches in float32 or bfloat16, got {k_cache.dtype}"
    return None
