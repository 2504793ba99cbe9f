"""Compressed convolutional attention (CCA, Zyphra 2025) from tree nodes to the
committed tokens and to their own ancestors, as in ZAYA.

Two short causal convolutions mix q and k, the first one channel by channel and the
second one within each head. The mean of the unmixed q and k of a group is added to
both. The last half of the channels of v is that of the token before.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.models.base.collectives import own
from stree_jax.models.configs.cca import CCAConfig, cca_params
from stree_jax.models.layers.mixer import MixerModule
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.layers.rope import angles
from stree_jax.models.mixers.attention import (
    AttentionRecord,
    AttentionState,
    attended,
    commit_attention,
    cut_heads,
)
from stree_jax.models.mixers.mla import by_head
from stree_jax.models.weights.linear import linear, linear_summed
from stree_jax.pallas_kernels import rounded_to, tree_conv

EPS = 2.0**-23  # smallest norm of a head that is divided by, as in transformers


class CCA(MixerModule):
    """The mixer: projection, convolutions, norms, rotary embedding, attention,
    projection."""

    config: CCAConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[AttentionRecord],
        state: AttentionState,
        record: AttentionRecord | None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract."""
        c, length, pending = self.config, pass_.length, pass_.pending
        p = declare(self, cca_params(c, u.shape[-1]), self.dtype)
        valid_count = pass_.valid_count
        if pending is not None:
            state = commit_attention(state, pending, length - pending.length)
        with jax.named_scope("qkv"):
            qkv = linear(u, p["qkv"], valid_count=valid_count)
            old = None if record is None else record.qkv
            inputs = pass_.merged(old, rounded_to(qkv, self.dtype))
            qkv = self.mixed(p, qkv, inputs, state.conv, pass_)
            depth = pass_.of_queries(pass_.nodes.depth)
            turns = angles(length[:, None] + depth, c.rope)
            options = {"config": c.heads, "dtype": self.dtype}
            q, *kv = cut_heads(qkv, *turns, valid_count, **options)
            before = None if record is None else replace(record, qkv=None)
            new = pass_.merged(before, AttentionRecord(*kv))
            record = replace(new, qkv=inputs)
        with jax.named_scope("attention"):
            y = attended(q, state, record, pass_, c.heads, self.dtype)
            out = linear_summed(y, p["out"], None, self.parts, valid_count)
        return out, record, state

    def mixed(
        self,
        p: dict[str, Any],
        qkv: jax.Array,
        inputs: jax.Array,
        conv0: jax.Array | None,
        pass_: Pass[AttentionRecord],
    ) -> jax.Array:
        """Computes q, k and v before the rotary embedding.

        Args:
          p: the parameters.
          qkv: [B, Tq, C] float32, the projections of the queried nodes.
          inputs: [B, T, C], those of all nodes.
          conv0: [B, K-1, C], those of the last committed tokens.
          pass_: the forward pass.

        Returns:
          [B, Tq, C] float32.
        """
        c, window = self.config, pass_.of_queries(pass_.nodes.taps(self.config.taps))
        assert conv0 is not None
        end = (c.num_heads + c.num_kv_heads) * c.head_dim  # of q and k
        q, k, v = jnp.split(qkv, [c.num_heads * c.head_dim, end], axis=2)
        convolved = self.convolved(p, inputs[..., :end], conv0[..., :end], window)
        q, k = self.normed(p, convolved, by_groups(q, c), by_groups(k, c))
        one = jnp.ones((v.shape[-1], 1), jnp.float32)
        earlier = (None, conv0[..., end:], window[:, :, -2:-1])
        late = own(jnp.arange(v.shape[-1] * self.parts.size), self.parts)
        late = late >= v.shape[-1] * self.parts.size // 2
        v = jnp.where(late, tree_conv(inputs[..., end:], one, *earlier), v)
        return jnp.concatenate([q, k, v], axis=2)

    def convolved(
        self, p: dict[str, Any], inputs: jax.Array, conv0: jax.Array, window: jax.Array
    ) -> jax.Array:
        """Computes both convolutions [B, Tq, Hq + Hk, hd] of q and k; arguments as in
        `mixed`.

        The second one reads the first one's output at a node and at its ancestors. That
        is computed again for each of its taps.
        """
        c = self.config
        first = c.taps - c.d_conv - c.d_head_conv + 1
        number = c.num_heads + c.num_kv_heads
        heads = (*window.shape[:2], number, c.head_dim)
        each = [
            tree_conv(
                inputs,
                p["conv_weight"],
                p["conv_bias"],
                conv0,
                window[:, :, first + j : first + j + c.d_conv],
            ).reshape(heads)
            for j in range(c.d_head_conv)
        ]
        weight = p["head_conv_weight"].reshape(number, c.head_dim, -1)
        y = by_head(jnp.concatenate(each, axis=-1), weight, axis=2)
        bias = p["head_conv_bias"].astype(jnp.float32)
        return y + bias.reshape(1, 1, number, c.head_dim)

    def normed(
        self, p: dict[str, Any], convolved: jax.Array, q: jax.Array, k: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the means to the convolved q and k, and norms each head.

        Args:
          p: the parameters.
          convolved: [B, Tq, Hq + Hk, hd] float32.
          q, k: [B, Tq, Hk, G, hd] float32 and [B, Tq, Hk, 1, hd], the projections.

        Returns:
          q [B, Tq, Hq * hd] and k [B, Tq, Hk * hd], float32.
        """
        c, lead = self.config, q.shape[:2]
        q = (q + k) * 0.5
        # In order: the bits of XLA's sum over an axis depend on the other axes.
        k = q[:, :, :, 0]
        for g in range(1, q.shape[3]):
            k = k + q[:, :, :, g]
        means = q.reshape(*lead, -1, c.head_dim), k / q.shape[3]
        heads = convolved + jnp.concatenate(means, axis=2)
        norm = ScaledNorm(EPS**2 / c.head_dim)
        heads = scaled_rms_norm(heads, jnp.ones((c.head_dim,), jnp.float32), norm)
        q, k = jnp.split(heads, [c.num_heads], axis=2)
        k = k * p["k_scale"].astype(jnp.float32).reshape(1, 1, -1, 1)
        return q.reshape(*lead, -1), k.reshape(*lead, -1)


def by_groups(x: jax.Array, c: CCAConfig) -> jax.Array:
    """Returns heads [B, T, H * hd] as [B, T, Hk, H / Hk, hd], those that read one KV
    head together."""
    return x.reshape(*x.shape[:2], c.num_kv_heads, -1, c.head_dim)
