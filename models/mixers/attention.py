"""Attention of tree nodes to the committed tokens and to their ancestors."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.config import AttentionConfig, Rope, Yarn, given
from stree_jax.models.nodes import Pass
from stree_jax.models.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.params import attention_params, declare
from stree_jax.models.state import AttentionRecord, AttentionState, commit_attention
from stree_jax.models.weights.linear import linear, linear_summed, scaled
from stree_jax.pallas_kernels import rounded_to, tree_attention, tree_conv


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each rotated pair, [dim / 2] float32."""
    powers = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    f = 1.0 / np.float32(rope.theta) ** powers / np.float32(rope.linear)
    if rope.yarn is not None:
        share = _yarn_shares(rope, rope.yarn)
        return (f / rope.yarn.factor * share + f * (1 - share)).astype(np.float32)
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


def _yarn_shares(rope: Rope, yarn: Yarn) -> np.ndarray:
    """Returns how much of each pair's frequency is divided by `yarn.factor`: [dim / 2],
    from 0 for the fastest pairs to 1 for the slowest."""

    def pair(turns: float) -> float:
        wavelength = yarn.original_length / turns
        return (
            rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001  # as transformers and llama.cpp avoid dividing by 0
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)


def angles(positions: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines [B, T, half] of the angles at positions [B, T].

    Both are multiplied by the attention factor of YaRN, if the embedding has one.
    """
    half = 0 if rope is None else rope.dim // 2
    f = np.zeros(0, np.float32) if rope is None else rope_frequencies(rope)
    frequencies = jnp.asarray(f).reshape(1, 1, half)
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    factor = 1.0 if rope is None or rope.yarn is None else rope.yarn.attention_factor
    return scaled(jnp.cos(angle), factor), scaled(jnp.sin(angle), factor)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Pairs (i, i + half) of x [B, T, heads, hd], turned by angles [B, T, half]."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin, rest], axis=-1
    )


def normed_heads(
    qkv: jax.Array, q_scale: jax.Array, k_scale: jax.Array, c: AttentionConfig
) -> jax.Array:
    """Divides each head of q and k by its root mean square and scales its channels.

    Args:
      qkv: [B, T, d_qkv] float32.
      q_scale, k_scale: [hd], the same for all heads.

    Returns:
      qkv [B, T, d_qkv] float32, of which v is unchanged.
    """
    norm = ScaledNorm(given(c.qk_norm_eps))
    heads = qkv.reshape(*qkv.shape[:2], -1, c.head_dim)
    q, k, v = jnp.split(heads, np.cumsum([c.num_heads, c.num_kv_heads]), axis=2)
    q, k = scaled_rms_norm(q, q_scale, norm), scaled_rms_norm(k, k_scale, norm)
    return jnp.concatenate([q, k, v], axis=2).reshape(qkv.shape)


class Attention(nn.Module):
    """Project, convolve, norm, rotate, attend, project back; see `AttentionConfig`.

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
            u, live = scaled(u, c.in_multiplier), pass_.live
            projected = linear(u, p["qkv"], p.get("qkv_bias"), live=live)
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
            if c.qk_norm_eps is not None:
                qkv = normed_heads(qkv, p["q_norm"], p["k_norm"], c)
            depth, mask = map(pass_.of_queries, (pass_.nodes.depth, pass_.nodes.mask))
            turns = angles(length[:, None] + depth, c.rope)
            q, *kv = cut_heads(qkv, *turns, live, config=c, dtype=self.dtype)
            new = AttentionRecord(*kv)
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
            out = linear_summed(y, p["out"], p.get("out_bias"), self.parts, live)
            return scaled(out, c.out_multiplier), record, state


def _heads_shapes(
    qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    lead, width = qkv.shape[:2], config.head_dim
    k = jax.ShapeDtypeStruct((*lead, config.num_kv_heads, width), dtype)
    return floats(*lead, config.num_heads, width), k, k


def _other_dtypes(qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any) -> bool:
    return qkv.dtype != jnp.float32 or dtype not in (jnp.float32, jnp.bfloat16)


# XLA makes eight operations of it, of which those that join rotated halves go number by
# number. In the kernel a number has the same bits whatever stands beside it.
@cpu_kernel(
    "stree_heads",
    outputs=_heads_shapes,
    unsupported=_other_dtypes,
    attributes=lambda config, dtype: {"key_multiplier": float(config.key_multiplier)},
)
def cut_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    live: jax.Array | None,
    *,
    config: AttentionConfig,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Cuts the projection into heads and rotates queries and keys.

    Args:
      qkv: [B, T, (Hq + 2 Hk) hd] float32.
      cos, sin: [B, T, half] float32, of the angles; half may be 0.
      live: as of `linear`; keys and values of other rows are 0.

    Returns:
      q [B, T, Hq, hd] float32 and k, v [B, T, Hk, hd] of `dtype`.
    """
    if live is not None:  # queries look at all keys, if only to leave them out
        place = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        qkv = jnp.where((place < live[:, None])[..., None], qkv, 0.0)
    heads = np.cumsum([config.num_heads, config.num_kv_heads])
    whole = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(whole, heads, axis=2)
    k = scaled(k, config.key_multiplier)
    if config.rope is not None:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return q, rounded_to(k, dtype), rounded_to(v, dtype)
