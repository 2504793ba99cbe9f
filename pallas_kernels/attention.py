"""Attention of tree nodes to the committed cache and to their ancestors."""

import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = lax.Precision.HIGHEST


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
    q = q.astype(k_cache.dtype).reshape(Bb, Tq, Hk, Hq // Hk, hd)
    k, v = k.astype(k_cache.dtype), v.astype(v_cache.dtype)

    def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(
            spec, left, right, precision=_HIGHEST, preferred_element_type=jnp.float32
        )

    committed = product("bksd,btkgd->bkgts", k_cache, q) * scale
    inside = product("bskd,btkgd->bkgts", k, q) * scale
    place = jnp.arange(S, dtype=jnp.int32)
    valid = (place[None] < length[:, None])[:, None, None, None]
    committed = jnp.where(valid, committed, -jnp.inf)
    inside = jnp.where(mask[:, None, None], inside, -jnp.inf)

    top = jnp.maximum(committed.max(-1), inside.max(-1))[..., None]  # self is allowed
    committed, inside = jnp.exp(committed - top), jnp.exp(inside - top)
    total = committed.sum(-1) + inside.sum(-1)
    out = product("bksd,bkgts->btkgd", v_cache, committed.astype(v_cache.dtype))
    out += product("bskd,bkgts->btkgd", v, inside.astype(v_cache.dtype))
    out = out / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return out.reshape(Bb, Tq, Hq, hd)
