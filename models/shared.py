"""Zamba2's transformer blocks, shared by several layers that adapt them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.models.config import ModelConfig
from stree_jax.models.layers import MLP, Attention, Norm, linear
from stree_jax.models.nodes import Nodes
from stree_jax.models.state import AttentionRecord, AttentionState

_normal = nn.initializers.normal(0.02)


class LowRank(nn.Module):
    """up(down(x)), a correction of few parameters."""

    rank: int
    rows: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down = self.param("down", _normal, (self.rank, x.shape[-1]), self.dtype)
        up = self.param("up", _normal, (self.rows, self.rank), self.dtype)
        return linear(linear(x, down), up)


class Adapters(nn.Module):
    """A layer's own corrections of the block it shares."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        c = self.config
        assert c.shared is not None and c.attention is not None and c.mlp is not None
        rank, a = c.shared.adapter_rank, c.attention
        self.gate_up = LowRank(rank, 2 * c.mlp.d_hidden, self.dtype)
        if c.shared.attention_adapter:
            self.q = LowRank(rank, a.num_heads * a.head_dim, self.dtype)
            self.k = LowRank(rank, a.num_kv_heads * a.head_dim, self.dtype)
            self.v = LowRank(rank, a.num_kv_heads * a.head_dim, self.dtype)

    def of_attention(self, u: jax.Array) -> jax.Array | None:
        assert self.config.shared is not None
        if not self.config.shared.attention_adapter:
            return None
        return jnp.concatenate([self.q(u), self.k(u), self.v(u)], axis=-1)

    def of_mlp(self, u: jax.Array) -> jax.Array:
        return self.gate_up(u)


class SharedBlock(nn.Module):
    """mlp(norm(attention(norm([h, embedding])))), without residual connections."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        c = self.config
        assert c.attention is not None and c.mlp is not None  # ModelConfig checks it
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.attention = Attention(c.attention, self.dtype)
        self.mlp_norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.mlp = MLP(c.mlp, self.dtype)

    def __call__(
        self,
        h: jax.Array,
        embedding: jax.Array,
        adapters: Adapters,
        nodes: Nodes,
        state: AttentionState,
        record: AttentionRecord | None,
        rows: jax.Array | None,
        pending: Any,
        length: jax.Array,
    ) -> tuple[jax.Array, Any, Any]:
        """The block's output, and record and state of its attention in this layer."""
        u = self.norm(jnp.concatenate([h, embedding], axis=-1))
        args = (u, nodes, state, record, rows, pending, length)
        a, new, state = self.attention(*args, adapters.of_attention(u))
        u = self.mlp_norm(a)
        return self.mlp(u, adapters.of_mlp(u)), new, state
