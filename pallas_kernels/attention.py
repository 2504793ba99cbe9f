"""Computes, in plain JAX, the attention from tree nodes to the KV cache and to their
ancestors.

`tree_attention` is the reference for the kernels, and gradients are computed from it.
`in_blocks` is used on CPUs: its time and memory depend on the length of the text, not
on the capacity of the cache.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import by_platform
from stree_jax.cpu_kernels.limits import ATTENTION_BLOCK
from stree_jax.pallas_kernels.rounding import rounded_to

_HIGHEST = lax.Precision.HIGHEST


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(
        spec, left, right, precision=_HIGHEST, preferred_element_type=jnp.float32
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
    first: jax.Array | None = None,
    sink: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(scale * q . [committed keys; ancestors' keys]) . values.

    Args:
      q: [B, Tq, Hq, hd], queries of Tq of the tree's nodes. Rotary embeddings are
        already applied, for position `length` + depth of the node.
      k, v: [B, T, Hk, hd], keys and values of the tree's T nodes. Query head i reads KV
        head i // (Hq/Hk).
      k_cache, v_cache: [B, Hk, S, hd], keys and values of the text before the tree, in
        a cache of S rows.
      length: [B] int32, number of valid rows in the cache. The other rows must be
        finite.
      mask: [B, Tq, T] bool. True if the node is the query itself or its ancestor.
      scale: softmax scale.
      first: [B, Tq] int32, the first row of the cache that each query sees. If None,
        it is 0.
      sink: [Hq] float32, the score of a key without a value, which every query of a
        head sees. If None, there is no such key.

    Returns:
      [B, Tq, Hq, hd] float32.
    """
    Bb, Tq, Hq, hd = q.shape
    Hk, S = k_cache.shape[1:3]
    rounded = partial(rounded_to, dtype=k_cache.dtype)
    q = rounded(q).reshape(Bb, Tq, Hk, Hq // Hk, hd)
    k, v = rounded(k), rounded(v)

    committed = _product("bksd,btkgd->bkgts", k_cache, q) * scale
    inside = _product("bskd,btkgd->bkgts", k, q) * scale
    place = jnp.arange(S, dtype=jnp.int32)
    valid = (place[None] < length[:, None])[:, None]
    if first is not None:
        valid &= place[None, None] >= first[..., None]
    committed = jnp.where(valid[:, None, None], committed, -jnp.inf)
    inside = jnp.where(mask[:, None, None], inside, -jnp.inf)

    # The maximum is finite, because every node sees at least itself.
    top = jnp.maximum(committed.max(-1), inside.max(-1))[..., None]
    if sink is not None:
        sink = sink.astype(jnp.float32).reshape(1, Hk, -1, 1, 1)
        top = jnp.maximum(top, sink)
    committed, inside = jnp.exp(committed - top), jnp.exp(inside - top)
    total = committed.sum(-1) + inside.sum(-1)
    if sink is not None:
        total += jnp.exp(sink - top)[..., 0]
    # Values of keys that a query does not see may be NaN, see `faults`.
    out = jnp.zeros((), jnp.float32)
    if first is not None:
        v_cache, fault = _split(v_cache)  # [B, Hk, S]
        hit = (valid[:, None] & fault[:, :, None]).any(-1)  # [B, Hk, Tq]
        out = jnp.where(hit.swapaxes(1, 2)[..., None, None], jnp.nan, out)
    v, fault = _split(v)  # [B, T, Hk]
    hit = (mask[..., None] & fault[:, None]).any(2)  # [B, Tq, Hk]
    out = jnp.where(hit[..., None, None], jnp.nan, out)
    out += _product("bksd,bkgts->btkgd", v_cache, rounded(committed))
    out += _product("bskd,bkgts->btkgd", v, rounded(inside))
    out = out / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return out.reshape(Bb, Tq, Hq, hd)


def _split(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values [..., hd] with rows that contain NaN or infinity set to 0, and
    which rows these are, [...] bool."""
    fault = ~jnp.isfinite(v).all(-1)
    return jnp.where(fault[..., None], jnp.zeros((), v.dtype), v), fault


Sums = tuple[jax.Array, jax.Array, jax.Array]


def in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    scale: float,
    first: jax.Array | None = None,
    sink: jax.Array | None = None,
) -> jax.Array:
    """Computes `tree_attention` block by block of the cache, up to the longest text of
    the batch, and from the first row that a query sees.

    As in `triton_attention`, each query carries the running maximum m of its scores,
    the sum l of exp(score - m), and the sum a of the values weighted by exp(score - m).
    The tree's nodes come first, so that m is finite from the start.

    If the last block would extend past the end of the cache, it begins earlier, and
    rows that were already counted get weight 0. With a capacity of whole blocks this
    does not happen, and results are bitwise independent of the capacity. The weights of
    the values stay float32, because rounding them costs XLA:CPU more time than the
    product.

    Args:
      q, k, v, k_cache, v_cache, length, mask, scale, first, sink: see
        `tree_attention`.

    Returns:
      [B, Tq, Hq, hd] float32.
    """
    (Bb, Tq, Hq, hd), T = q.shape, k.shape[1]
    Hk, S = k_cache.shape[1:3]
    groups, block = Hq // Hk, min(ATTENTION_BLOCK, S)
    q = q.astype(k_cache.dtype).reshape(Bb, Tq, Hk, groups, hd)
    q = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(Bb, Hk, groups * Tq, hd)

    def by_query(z: jax.Array) -> jax.Array:
        """Reshapes numbers [B, Tq] of queries to [B, 1, groups * Tq, 1]."""
        each = jnp.broadcast_to(z[:, None], (Bb, groups, Tq))
        return each.reshape(Bb, 1, groups * Tq, 1)

    def scores(k: jax.Array, allowed: jax.Array) -> jax.Array:
        s = _product("bkmd,bksd->bkms", q, k) * scale
        return jnp.where(allowed, s, -jnp.inf)

    def sums(
        s: jax.Array, m: jax.Array, v: jax.Array, allowed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Values of keys that a query does not see may be NaN, see `faults`.
        p, v = jnp.exp(s - m[..., None]), v.astype(jnp.float32)
        if allowed.shape[2] == 1:  # all queries see the same keys
            v = jnp.where(allowed.swapaxes(2, 3), v, 0.0)
            return p.sum(-1), _product("bkms,bksd->bkmd", p, v)
        v, fault = _split(v)
        hit = (allowed & fault[:, :, None]).any(-1)
        values = _product("bkms,bksd->bkmd", p, v)
        return p.sum(-1), jnp.where(hit[..., None], jnp.nan, values)

    def add_block(i: jax.Array, seen: Sums) -> Sums:
        m, total, weighted = seen
        begin = jnp.minimum(i * block, S - block)
        place = begin + jnp.arange(block, dtype=jnp.int32)[None]
        new = ((place >= i * block) & (place < length[:, None]))[:, None, None]
        if first is not None:
            new &= place[:, None, None] >= by_query(first)
        s = scores(_rows(k_cache, begin, block), new)
        top = jnp.maximum(m, s.max(-1))
        more, values = sums(s, top, _rows(v_cache, begin, block), new)
        kept = jnp.exp(m - top)
        return top, kept * total + more, kept[..., None] * weighted + values

    k, v = (z.astype(k_cache.dtype).swapaxes(1, 2) for z in (k, v))
    inside = jnp.broadcast_to(mask[:, None, None], (Bb, 1, groups, Tq, T))
    inside = inside.reshape(Bb, 1, groups * Tq, T)
    s = scores(k, inside)
    m = s.max(-1)
    # With S = 0, block is 0, too: avoid the division.
    blocks = (length.max() + block - 1) // block if S else 0
    begin = 0 if first is None or not S else first.min() // block
    m, total, weighted = lax.fori_loop(
        begin, blocks, add_block, (m, *sums(s, m, v, inside))
    )
    if sink is not None:
        each = sink.astype(jnp.float32).reshape(1, Hk, groups, 1)
        each = jnp.broadcast_to(each, (Bb, Hk, groups, Tq)).reshape(m.shape)
        top = jnp.maximum(m, each)
        kept = jnp.exp(m - top)
        total = kept * total + jnp.exp(each - top)
        weighted = kept[..., None] * weighted
    out = (weighted / total[..., None]).reshape(Bb, Hk, groups, Tq, hd)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(Bb, Tq, Hq, hd)


def _rows(cache: jax.Array, begin: jax.Array, count: int) -> jax.Array:
    """Returns `count` rows of a cache [B, Hk, S, hd], from row `begin` [] on."""
    rows = lax.dynamic_slice_in_dim(as_bits(cache), begin, count, axis=2)
    return rows.view(cache.dtype)


def as_bits(z: jax.Array) -> jax.Array:
    """Views 16-bit floats as uint16, the dtype in which caches store them.

    Other dtypes are returned unchanged. XLA:CPU cannot slice or update 16-bit floats:
    it would convert the whole cache to float32 and back to access a few rows.
    """
    return z.view(jnp.uint16) if z.dtype.itemsize == 2 else z


@jax.custom_jvp
def without_kernel(*args: jax.Array | None) -> jax.Array:
    """Computes `in_blocks` on a CPU and `tree_attention` elsewhere.

    Under differentiation, values and derivatives come from `tree_attention`, because
    JAX cannot differentiate a loop whose length is not known at compile time.

    Args:
      *args: arguments of `tree_attention`, in order.
    """
    return by_platform(*args, cpu=in_blocks, default=tree_attention)


without_kernel.defjvp(partial(jax.jvp, tree_attention))
