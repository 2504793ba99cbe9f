"""Zamba2's transformer blocks, shared by several layers that adapt them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.models.config import ModelConfig, given
from stree_jax.models.mixers.attention import Attention
from stree_jax.models.mixers.mlp import MLP
from stree_jax.models.nodes import Pass
from stree_jax.models.norm import Norm
from stree_jax.models.params import adapter_runs, declare, low_rank_params
from stree_jax.models.sharding.shards import WHOLE, Cut, Run
from stree_jax.models.state import AttentionRecord, AttentionState
from stree_jax.models.weights.linear import linear


class LowRank(nn.Module):
    """up(down(x)), a correction of few parameters."""

    rank: int
    runs: tuple[Run, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        table = low_rank_params(self.rank, x.shape[-1], self.runs)
        p = declare(self, table, self.dtype)
        return linear(linear(x, p["down"]), p["up"])


class Adapters(nn.Module):
    """A layer's own corrections of the block it shares."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        rank, runs = given(self.config.shared).adapter_rank, adapter_runs(self.config)
        self.gate_up = LowRank(rank, runs["gate_up"], self.dtype)
        if given(self.config.shared).attention_adapter:
            self.q, self.k, self.v = (
                LowRank(rank, runs[name], self.dtype) for name in "qkv"
            )

    def of_attention(self, u: jax.Array) -> jax.Array | None:
        """[B, Tq, d_qkv] of u [B, Tq, 2 d], or None."""
        if not given(self.config.shared).attention_adapter:
            return None
        return jnp.concatenate([self.q(u), self.k(u), self.v(u)], axis=-1)

    def of_mlp(self, u: jax.Array) -> jax.Array:
        """[B, Tq, 2 d_hidden] of u [B, Tq, d]."""
        return self.gate_up(u)


class SharedBlock(nn.Module):
    """mlp(norm(attention(norm([h, embedding])))), without residual connections."""

    config: ModelConfig
    dtype: Any
    cut: Cut = WHOLE

    def setup(self):
        c, cut = self.config, self.cut
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.attention = Attention(given(c.attention), self.dtype, cut.attention)
        self.mlp_norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.mlp = MLP(given(c.mlp), self.dtype, cut.mlp)

    def __call__(
        self,
        both: jax.Array,
        adapters: Adapters,
        pass_: Pass[AttentionRecord],
        state: AttentionState,
        record: AttentionRecord | None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """As all mixers; `both` [B, Tq, 2 d] is the residual stream and the embedding.

        Record and state are those of the block's attention in this layer.
        """
        u = self.norm(both)
        adapter = adapters.of_attention(u)
        a, record, state = self.attention(u, pass_, state, record, adapter)
        u = self.mlp_norm(a)
        return self.mlp(u, adapters.of_mlp(u)), record, state
