"""Attention of tree nodes to the committed tokens and to their ancestors."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.models.config import AttentionConfig, Rope
from stree_jax.models.linear import linear, linear_summed, scaled
from stree_jax.models.nodes import Pass
from stree_jax.models.params import attention_params, declare
from stree_jax.models.state import AttentionRecord, AttentionState, commit_attention
from stree_jax.pallas_kernels import rounded_to, tree_attention, tree_conv


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each rotated pair, [dim / 2] float32."""
    powers = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    f = 1.0 / np.float32(rope.theta) ** powers
    if rope.llama3 is None:
        return f.astype(np.float32)
    factor, low, high, old = rope.llama3
    wavelength = 2 * np.pi / f
    s = (old / wavelength - low) / (high - low)
    f = np.where(
        wavelength > old / low,
        f / factor,
        np.where(wavelength < old / high, f, f * ((1 - s) / factor + s)),
    )
    return f.astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotate pairs (i, i + dim/2) of x [B, T, heads, hd] by positions [B, T]."""
    half = rope.dim // 2
    frequencies = jnp.asarray(rope_frequencies(rope)).reshape(1, 1, 1, half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin, rest], axis=-1
    )


class Attention(nn.Module):
    """Project, convolve, rotate, attend, project back; see `AttentionConfig`.

    Attributes:
      parts: as `Cut.attention`.
    """

    config: AttentionConfig
    dtype: Any
    parts: int = 1

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[AttentionRecord],
        state: AttentionState,
        record: AttentionRecord | None,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """Of u [B, Tq, d]: out [B, Tq, d] float32, record and state, see `Pass`.

        Args:
          adapter: [B, Tq, d_qkv], added to q, k and v.
        """
        c, length, pending = self.config, pass_.length, pass_.pending
        p = declare(self, attention_params(c, u.shape[-1]), self.dtype)
        if pending is not None:
            state = commit_attention(state, pending, length - pending.length)

        with jax.named_scope("qkv"):
            projected = linear(scaled(u, c.in_multiplier), p["qkv"], p.get("qkv_bias"))
            qkv, mlp = jnp.split(projected, [c.d_qkv], axis=-1)
            if adapter is not None:
                qkv = qkv + adapter
            inputs = None
            if state.conv is not None:
                old = None if record is None else record.qkv
                inputs = pass_.merged(old, rounded_to(qkv, state.conv.dtype))
                window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
                conv = (p["conv_weight"], p["conv_bias"], state.conv, window)
                qkv = tree_conv(inputs, *conv)
            q, k, v = split_heads(qkv, c)
            k = scaled(k, c.key_multiplier)
            depth, mask = map(pass_.of_queries, (pass_.nodes.depth, pass_.nodes.mask))
            if c.rope is not None:
                positions = length[:, None] + depth
                q, k = (apply_rope(w, positions, c.rope) for w in (q, k))
            new = AttentionRecord(*(rounded_to(z, self.dtype) for z in (k, v)))
            before = None if record is None else replace(record, qkv=None)
            record = replace(pass_.merged(before, new), qkv=inputs)

        with jax.named_scope("attention"):
            scale = c.head_dim**-0.5 if c.scale is None else c.scale
            k_cache, v_cache = (z.view(self.dtype) for z in (state.k, state.v))
            arrays = (q, record.k, record.v, k_cache, v_cache, length, mask)
            y = tree_attention(*arrays, scale)
            y = y.reshape(*u.shape[:2], -1)
            if c.d_mlp:
                up, gate = jnp.split(mlp, 2, axis=-1)
                y = jnp.concatenate([y, up * jax.nn.silu(gate)], axis=-1)
            out = linear_summed(y, p["out"], p.get("out_bias"), self.parts)
            return scaled(out, c.out_multiplier), record, state


def split_heads(qkv: jax.Array, c: AttentionConfig) -> list[jax.Array]:
    """q [B,T,Hq,hd], k, v [B,T,Hk,hd] of qkv [B,T,d_qkv]."""
    heads = np.cumsum([c.num_heads, c.num_kv_heads])
    return jnp.split(qkv.reshape(*qkv.shape[:2], -1, c.head_dim), heads, axis=2)
