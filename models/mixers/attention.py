"""Attention from tree nodes to the committed tokens and to their own ancestors."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.base.shards import ALONE, Group
from stree_jax.models.configs.attention import (
    Attends,
    AttentionConfig,
    attention_params,
)
from stree_jax.models.layers.mixer import MixerModule
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.layers.rope import angles, rotated, temperatures
from stree_jax.models.mixers.kv_cache import (
    AttentionRecord,
    AttentionState,
    commit_attention,
)
from stree_jax.models.weights.linear import linear, linear_summed, scaled
from stree_jax.pallas_kernels import rounded_to, tree_attention, tree_conv


def normed_heads(
    qkv: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    c: AttentionConfig,
    parts: Group = ALONE,
) -> jax.Array:
    """Applies an RMSNorm to each head of q and k, or to all heads together, and to each
    head of v if the config says so.

    Args:
      qkv: [B, T, d_qkv] float32, the channels of q, k and v.
      q_scale, k_scale: the norms' scales: [hd], the same for all heads, or of all
        channels.
      c: the config.
      parts: the devices that share the heads.

    Returns:
      [B, T, d_qkv] float32. Without a norm of v, its channels are unchanged.
    """
    assert c.qk_norm_eps is not None
    if c.qk_norm_whole:
        norm = ScaledNorm(c.qk_norm_eps, parts=parts)
        ends = np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim
        q, k, v = jnp.split(qkv, ends, axis=2)
        q, k = scaled_rms_norm(q, q_scale, norm), scaled_rms_norm(k, k_scale, norm)
        return jnp.concatenate([q, k, v], axis=2)
    norm = ScaledNorm(c.qk_norm_eps)
    heads = qkv.reshape(*qkv.shape[:2], -1, c.head_dim)
    q, k, v = jnp.split(heads, np.cumsum([c.num_heads, c.num_kv_heads]), axis=2)
    q, k = scaled_rms_norm(q, q_scale, norm), scaled_rms_norm(k, k_scale, norm)
    if c.v_norm:
        v = scaled_rms_norm(v, jnp.ones((c.head_dim,), jnp.float32), norm)
    return jnp.concatenate([q, k, v], axis=2).reshape(qkv.shape)


class Attention(MixerModule):
    """Attention: projection, convolution, norms, rotary embedding, attention,
    projection."""

    config: AttentionConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[AttentionRecord],
        state: AttentionState,
        record: AttentionRecord | None,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract.

        Args:
          adapter: [B, Tq, d_qkv], added to q, k and v. If None, nothing is added.
        """
        c, length, pending = self.config, pass_.length, pass_.pending
        p = declare(self, attention_params(c, u.shape[-1]), self.dtype)
        if pending is not None:
            state = commit_attention(state, pending, length - pending.length)

        with jax.named_scope("qkv"):
            u, valid_count = scaled(u, c.in_multiplier), pass_.valid_count
            projected = linear(u, p["qkv"], p.get("qkv_bias"), valid_count=valid_count)
            gate, qkv, mlp = jnp.split(
                projected, [c.d_gate, c.d_gate + c.d_projected], axis=-1
            )
            if c.k_is_v:
                keys = qkv[..., c.num_heads * c.head_dim :]
                qkv = jnp.concatenate([qkv, keys], axis=-1)
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
                qkv = normed_heads(qkv, p["q_norm"], p["k_norm"], c, self.parts)
            depth = pass_.of_queries(pass_.nodes.depth)
            positions = length[:, None] + depth
            turns = angles(positions, c.rope)
            q, *kv = cut_heads(qkv, *turns, valid_count, config=c, dtype=self.dtype)
            if c.temperature is not None:
                q = q * temperatures(positions, c.temperature)[:, :, None, None]
            new = AttentionRecord(*kv)
            before = None if record is None else replace(record, qkv=None)
            record = replace(pass_.merged(before, new), qkv=inputs)

        with jax.named_scope("attention"):
            y = attended(q, state, record, pass_, c, self.dtype, p.get("sinks"))
            if c.gated:
                if c.gate_by_head:
                    gate = jnp.repeat(gate, c.head_dim, axis=-1)
                y = y * jax.nn.sigmoid(gate)
            if c.d_mlp:
                up, mlp_gate = jnp.split(mlp, 2, axis=-1)
                y = jnp.concatenate([y, up * jax.nn.silu(mlp_gate)], axis=-1)
            out = linear_summed(y, p["out"], p.get("out_bias"), self.parts, valid_count)
            return scaled(out, c.out_multiplier), record, state


def attended(
    q: jax.Array,
    state: AttentionState,
    record: AttentionRecord,
    pass_: Pass[Any],
    c: Attends,
    dtype: Any,
    sink: jax.Array | None = None,
) -> jax.Array:
    """Computes what the queried nodes read from the committed tokens and from their
    ancestors.

    Args:
      q: [B, Tq, Hq, hd] float32, after the rotary embedding.
      state: the caches of the committed tokens.
      record: keys and values of all T nodes.
      pass_: the forward pass.
      c: the mixer's config.
      dtype: dtype of the caches.
      sink: see `tree_attention`.

    Returns:
      [B, Tq, Hq * hd] float32.
    """
    scale = c.head_dim**-0.5 if c.scale is None else c.scale
    k_cache, v_cache = (z.view(dtype) for z in (state.k, state.v))
    first, mask = seen_tokens(c.window, pass_, pass_.of_queries(pass_.nodes.mask))
    arrays = (q, record.k, record.v, k_cache, v_cache, pass_.length, mask)
    y = tree_attention(*arrays, scale, first, sink)
    return y.reshape(*q.shape[:2], -1)


def seen_tokens(
    window: int, pass_: Pass[AttentionRecord], mask: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Returns what the queried nodes see through a sliding window.

    Args:
      window: tokens that a token sees, itself included; 0 for all.
      pass_: the forward pass.
      mask: [B, Tq, T] bool, the ancestors of the queried nodes.

    Returns:
      The first row of the cache [B, Tq] int32 that each node sees, or None for the
      first row; and the mask of the ancestors that it sees.
    """
    if not window:
        return None, mask
    depth, nodes = pass_.of_queries(pass_.nodes.depth), pass_.nodes.depth
    place = pass_.length[:, None] + depth
    near = depth[:, :, None] - nodes[:, None] < window
    return jnp.maximum(place - (window - 1), 0), mask & near


def _heads_shapes(
    qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    lead, width = qkv.shape[:2], config.head_dim
    k = jax.ShapeDtypeStruct((*lead, config.num_kv_heads, width), dtype)
    return floats(*lead, config.num_heads, width), k, k


def _heads_unsupported(
    qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any
) -> bool:
    return qkv.dtype != jnp.float32 or dtype not in (jnp.float32, jnp.bfloat16)


# XLA:CPU compiles this to eight operations, and concatenates the rotated halves with
# scalar code. The kernel's results do not depend on the other tokens of the pass.
@cpu_kernel(
    "stree_heads",
    outputs=_heads_shapes,
    unsupported=_heads_unsupported,
    attributes=lambda config, dtype: {"key_multiplier": float(config.key_multiplier)},
)
def cut_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    valid_count: jax.Array | None,
    *,
    config: AttentionConfig,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Splits the projection into heads and applies the rotary embedding to q and k.

    Args:
      qkv: [B, T, (Hq + 2 Hk) hd] float32.
      cos, sin: [B, T, half] float32, cosines and sines of the angles; half may be 0.
      valid_count: as in `linear`. Keys and values of padding are 0.
      config: the config.
      dtype: dtype of k and v.

    Returns:
      q [B, T, Hq, hd] float32, and k and v [B, T, Hk, hd] in `dtype`.
    """
    if valid_count is not None:  # products also read masked keys, which must be finite
        place = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        qkv = jnp.where((place < valid_count[:, None])[..., None], qkv, 0.0)
    heads = np.cumsum([config.num_heads, config.num_kv_heads])
    whole = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(whole, heads, axis=2)
    k = scaled(k, config.key_multiplier)
    if config.rope is not None:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return q, rounded_to(k, dtype), rounded_to(v, dtype)
