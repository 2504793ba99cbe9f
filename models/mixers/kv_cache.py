"""The KV cache of attention, and how an accepted path is appended to it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import cpu_kernel, like
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.layers.mixer import MixerPending, leaf
from stree_jax.pallas_kernels import commit_window


@struct.dataclass
class AttentionState:
    """The caches of an attention mixer.

    Attributes:
      k, v: [B, Hk, S, hd], KV cache. Rows below the committed length are valid. 16-bit
        floats are stored as uint16 (see `as_bits`).
      conv: [B, K-1, C], the last inputs of the convolution over q, k and v. None
        without a convolution.
    """

    k: jax.Array = leaf("cache", part_axis=1, capacity_axis=2)
    v: jax.Array = leaf("cache", part_axis=1, capacity_axis=2)
    conv: jax.Array | None = leaf("window", part_axis=2, default=None)

    def commit(
        self, pending: "MixerPending[AttentionRecord]", start: jax.Array
    ) -> "AttentionState":
        """Returns the state after an accepted path; see `mixer.MixerState`."""
        return commit_attention(self, pending, start)


@struct.dataclass
class AttentionRecord:
    """Keys and values of T tokens.

    Attributes:
      k, v: [B, T, Hk, hd], after the rotary embedding.
      qkv: [B, T, C], inputs of the convolution over q, k and v. None without a
        convolution.
    """

    k: jax.Array = leaf("record", part_axis=2)
    v: jax.Array = leaf("record", part_axis=2)
    qkv: jax.Array | None = leaf("record", part_axis=2, default=None)


def append_rows(
    cache: jax.Array, rows: jax.Array, path: jax.Array, start: jax.Array
) -> jax.Array:
    """Writes the rows of an accepted path into a KV cache and returns the cache.

    All M rows are written. Those past the path's length end up past the committed
    length, where the next step overwrites them, so S needs space for M more rows.

    Args:
      cache: [B, Hk, S, hd].
      rows: [B, T, Hk, hd], keys or values of the tree's nodes.
      path: [B, M] int32, rows of the accepted tokens in order.
      start: [B] int32, cache row that the path begins at.
    """
    chosen = jax.vmap(lambda z, p: z[p])(rows, path).swapaxes(1, 2)
    zero, batch = np.int32(0), cache.shape[0]

    def written(cache: jax.Array, b: Any, row: jax.Array) -> jax.Array:
        place = (b, zero, start[b], zero)
        return jax.lax.dynamic_update_slice(cache, row.view(cache.dtype), place)

    if cpu_kernels.symbolic_size(batch):
        number = jnp.asarray(batch, jnp.int32)
        row = partial(jax.lax.dynamic_index_in_dim, chosen)
        return jax.lax.fori_loop(0, number, lambda b, z: written(z, b, row(b)), cache)
    for b in range(batch):  # XLA updates one slice per batch row in place
        cache = written(cache, np.int32(b), chosen[b : b + 1])
    return cache


def _append_unsupported(
    caches: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    path: jax.Array,
    start: jax.Array,
) -> bool:
    sizes = {z.dtype.itemsize for z in (*caches, *rows)}
    known = len(sizes) == 1 and path.dtype == start.dtype == jnp.int32
    return not known or 0 in (path.size, *(z.size for z in (*caches, *rows)))


@cpu_kernel(
    "stree_append",
    outputs=lambda caches, *_: like(caches),
    unsupported=_append_unsupported,
    aliases={"caches": None},
)
def append_both(
    caches: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    path: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Appends an accepted path to the key and the value cache; see `append_rows`.

    Args:
      caches: keys and values, each [B, Hk, S, hd].
      rows: keys and values of the tree's nodes, each [B, T, Hk, hd].
      path: [B, M] int32.
      start: [B] int32.
    """
    (k_cache, v_cache), (k, v), place = caches, rows, (path, start)
    return append_rows(k_cache, k, *place), append_rows(v_cache, v, *place)


@traced_once
def commit_attention(
    state: AttentionState, pending: MixerPending[AttentionRecord], start: jax.Array
) -> AttentionState:
    """Returns the state after an accepted path whose first token is cache row `start`
    [B] int32."""
    record, path, conv = pending.record, pending.path, state.conv
    if conv is not None and record.qkv is not None:
        conv = commit_window(conv, record.qkv, path, pending.length)
    k, v = append_both((state.k, state.v), (record.k, record.v), path, start)
    return AttentionState(k, v, conv)
