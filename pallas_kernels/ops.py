"""The ops as models call them: one public function each, run by a kernel or by XLA.

`implementation` is None (a kernel where the program is compiled for CUDA and the
arguments allow it, plain JAX elsewhere), "xla", or the name of a kernel, which then
runs or raises. What they compute is defined in `scan` and `attention`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.pallas_kernels import (
    attention,
    mosaic_scan,
    scan,
    triton_attention,
    triton_scan,
)
from stree_jax.pallas_kernels.dispatch import Implementation, Kernel, dispatch


def tree_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Outputs of a linear recurrence along every path of a tree: `scan.tree_scan`."""
    reason = triton_scan.unsupported(x, B, mask)
    kernels = {"triton": Kernel(triton_scan.tree_scan, reason)}
    args = (x, dt, a, B, C, D, h0, mask, rows)
    return dispatch("tree_scan", implementation, scan.tree_scan, kernels, *args)


def replay_tree_scan(
    h0: jax.Array,
    replayed: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    path: jax.Array,
    length: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    mask: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The last path's replay and this tree's scan: `scan.replay_tree_scan`."""
    triton = triton_scan.unsupported(x, B, mask, path)
    mosaic = mosaic_scan.unsupported(x, B, mask, path)
    kernels = {  # the older backend first, until they have been measured side by side
        "triton": Kernel(triton_scan.replay_tree_scan, triton),
        "mosaic_gpu": Kernel(mosaic_scan.replay_tree_scan, mosaic),
    }
    return dispatch(
        "replay_tree_scan",
        implementation,
        scan.replay_tree_scan,
        kernels,
        *(h0, replayed, path, length, x, dt, a, B, C, D, mask),
    )


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    scale: float,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention to the committed cache and to ancestors: `attention.tree_attention`."""
    reason = triton_attention.unsupported(q, k_cache, v_cache, mask)
    kernel = partial(triton_attention.tree_attention, scale=scale)
    return dispatch(
        "tree_attention",
        implementation,
        partial(attention.tree_attention, scale=scale),
        {"triton": Kernel(kernel, reason)},
        *(q, k, v, k_cache, v_cache, length, mask),
    )


def chunk_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    h0: jax.Array,
    chunk: int,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`tree_scan` with a causal mask, in time linear in T (SSD, Mamba2 section 6).

    Every chunk is a causal `tree_scan` whose h0 is the state that `replay` of the
    chunks before it gives; only that short recurrence over chunks is sequential.

    Args:
      x, dt, a, B, C, D, h0: as in `scan.tree_scan`, Tq = T.
      chunk: tokens per chunk; T need not be a multiple of it.

    Returns:
      y [B, T, H, P] float32.
    """
    batch, T = x.shape[:2]
    pad = -T % chunk
    n_chunks = (T + pad) // chunk

    def chunked(z: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * chunks, chunk, ...]
        z = jnp.pad(z, ((0, 0), (0, pad)) + ((0, 0),) * (z.ndim - 2))
        return z.reshape(batch * n_chunks, chunk, *z.shape[2:])

    x, dt, a, B, C = (chunked(z) for z in (x, dt, a, B, C))
    rows = jnp.broadcast_to(jnp.arange(chunk), (batch * n_chunks, chunk))
    full = jnp.full((batch * n_chunks,), chunk)
    zero = jnp.zeros((batch * n_chunks, *h0.shape[1:]), jnp.float32)
    added = scan.replay(zero, x, dt, a, B, rows, full)
    added = added.reshape(batch, n_chunks, *h0.shape[1:]).swapaxes(0, 1)
    kept = jnp.exp(a.astype(jnp.float32).sum(axis=1))
    kept = kept.reshape(batch, n_chunks, -1).swapaxes(0, 1)[..., None, None]

    def step(h, inputs):
        kept, added = inputs
        return kept * h + added, h

    _, before = lax.scan(step, h0, (kept, added))
    before = before.swapaxes(0, 1).reshape(batch * n_chunks, *h0.shape[1:])
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    causal = jnp.broadcast_to(causal, (batch * n_chunks, chunk, chunk))
    y = tree_scan(x, dt, a, B, C, D, before, causal, implementation=implementation)
    return y.reshape(batch, n_chunks * chunk, *y.shape[2:])[:, :T]
