"""Attention of tree nodes to the committed cache and to their ancestors.

`tree_attention` is the definition, which gradients come from. `in_blocks` is how a CPU
computes it: in the time and memory of the text, whatever the capacity of the cache.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import by_platform
from stree_jax.pallas_kernels.rounding import rounded_to

_HIGHEST = lax.Precision.HIGHEST
ATTENTION_BLOCK = 128  # rows of the cache at a time: scores stay in a core's own


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
) -> jax.Array:
    """softmax(scale * q . [committed keys; ancestors' keys]) . values.

    Args:
      q: [B, Tq, Hq, hd], rotated at position = committed length + depth.
      k, v: [B, T, Hk, hd], the tree's nodes; query head i reads head i // (Hq/Hk).
      k_cache, v_cache: [B, Hk, S, hd], committed keys and values.
      length: [B] int32, valid entries of the cache; the rest must be finite.
      mask: [B, Tq, T] bool, ancestor-or-self.
      scale: softmax scale.

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
    valid = (place[None] < length[:, None])[:, None, None, None]
    committed = jnp.where(valid, committed, -jnp.inf)
    inside = jnp.where(mask[:, None, None], inside, -jnp.inf)

    top = jnp.maximum(committed.max(-1), inside.max(-1))[..., None]  # self is allowed
    committed, inside = jnp.exp(committed - top), jnp.exp(inside - top)
    total = committed.sum(-1) + inside.sum(-1)
    out = _product("bksd,bkgts->btkgd", v_cache, rounded(committed))
    out += _product("bskd,bkgts->btkgd", v, rounded(inside))
    out = out / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return out.reshape(Bb, Tq, Hq, hd)


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
) -> jax.Array:
    """`tree_attention` by blocks of the cache, up to the longest text.

    The nodes come first, which gives every query a finite maximum m. Of each block it
    then keeps, as `triton_attention` has it, m, the sum l of exp(score - m) and the sum
    a of values with these weights. Where the cache ends inside a block, that one begins
    early, and what was seen before weighs 0. Of caches of whole blocks there is none,
    and the capacity changes no bit of a result. Weights of values stay float32, as
    rounding them costs XLA:CPU more than the product.
    """
    (Bb, Tq, Hq, hd), T = q.shape, k.shape[1]
    Hk, S = k_cache.shape[1:3]
    groups, block = Hq // Hk, min(ATTENTION_BLOCK, S)
    q = q.astype(k_cache.dtype).reshape(Bb, Tq, Hk, groups, hd)
    q = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(Bb, Hk, groups * Tq, hd)

    def scores(k: jax.Array, allowed: jax.Array) -> jax.Array:
        s = _product("bkmd,bksd->bkms", q, k) * scale
        return jnp.where(allowed, s, -jnp.inf)

    def sums(s: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = jnp.exp(s - m[..., None])
        return p.sum(-1), _product("bkms,bksd->bkmd", p, v.astype(jnp.float32))

    def add_block(i: jax.Array, seen: Sums) -> Sums:
        m, total, weighted = seen
        begin = jnp.minimum(i * block, S - block)
        place = begin + jnp.arange(block, dtype=jnp.int32)[None]
        new = (place >= i * block) & (place < length[:, None])
        s = scores(_rows(k_cache, begin, block), new[:, None, None])
        top = jnp.maximum(m, s.max(-1))
        more, values = sums(s, top, _rows(v_cache, begin, block))
        kept = jnp.exp(m - top)
        return top, kept * total + more, kept[..., None] * weighted + values

    k, v = (z.astype(k_cache.dtype).swapaxes(1, 2) for z in (k, v))
    inside = jnp.broadcast_to(mask[:, None, None], (Bb, 1, groups, Tq, T))
    s = scores(k, inside.reshape(Bb, 1, groups * Tq, T))
    m = s.max(-1)
    # A cache of no rows has no block.
    blocks = (length.max() + block - 1) // block if S else 0
    _, total, weighted = lax.fori_loop(0, blocks, add_block, (m, *sums(s, m, v)))
    out = (weighted / total[..., None]).reshape(Bb, Hk, groups, Tq, hd)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(Bb, Tq, Hq, hd)


def _rows(cache: jax.Array, begin: jax.Array, count: int) -> jax.Array:
    """Rows of a cache [B, Hk, S, hd] from `begin` [] on."""
    rows = lax.dynamic_slice_in_dim(as_bits(cache), begin, count, axis=2)
    return rows.view(cache.dtype)


def as_bits(z: jax.Array) -> jax.Array:
    """16-bit numbers as the uint16 that they are kept as in caches; others as they are.

    XLA:CPU slices and updates nothing in 16-bit floats: it would make the whole cache
    float32 and back, for a few rows.
    """
    return z.view(jnp.uint16) if z.dtype.itemsize == 2 else z


@jax.custom_vjp
def without_kernel(*args: jax.Array) -> jax.Array:
    """`tree_attention`, on a CPU `in_blocks`; arguments of both, in their order.

    A loop of unknown length cannot be differentiated: gradients, and the values that
    come with them, are the definition's.
    """
    return by_platform(*args, cpu=in_blocks, default=tree_attention)


def _forward(*args: jax.Array) -> tuple[jax.Array, Callable]:
    return jax.vjp(tree_attention, *args)


def _backward(pull: Callable, given: jax.Array) -> tuple:
    return pull(given)


without_kernel.defvjp(_forward, _backward)
