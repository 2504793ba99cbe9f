"""Zamba2's transformer blocks, shared by several layers, each with its own adapters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.models.base.shards import WHOLE, Cut, Run
from stree_jax.models.configs.params import low_rank_params
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import Norm
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers import computation_of
from stree_jax.models.stack.config import ModelConfig, required
from stree_jax.models.stack.param_table import adapter_runs
from stree_jax.models.weights.linear import linear


class LowRank(nn.Module):
    """A low-rank adapter, up(down(x))."""

    rank: int
    runs: tuple[Run, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        table = low_rank_params(self.rank, x.shape[-1], self.runs)
        p = declare(self, table, self.dtype)
        return linear(linear(x, p["down"]), p["up"])


class Adapters(nn.Module):
    """A layer's low-rank adapters of its shared transformer block."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        rank = required(self.config.shared).adapter_rank
        runs = adapter_runs(self.config)
        self.gate_up = LowRank(rank, runs["gate_up"], self.dtype)
        if required(self.config.shared).attention_adapter:
            self.q, self.k, self.v = (
                LowRank(rank, runs[name], self.dtype) for name in "qkv"
            )

    def of_attention(self, u: jax.Array) -> jax.Array | None:
        """Computes the terms [B, Tq, d_qkv] added to q, k and v, from u [B, Tq, 2 d].

        Returns None if the config has no attention adapter.
        """
        if not required(self.config.shared).attention_adapter:
            return None
        return jnp.concatenate([self.q(u), self.k(u), self.v(u)], axis=-1)

    def of_mlp(self, u: jax.Array) -> jax.Array:
        """Computes the terms [B, Tq, 2 d_hidden] added to gate and up, from u
        [B, Tq, d]."""
        return self.gate_up(u)


class SharedBlock(nn.Module):
    """A shared transformer block: mlp(norm(attention(norm([h, embedding])))).

    It has no residual connections.
    """

    config: ModelConfig
    dtype: Any
    cut: Cut = WHOLE

    def setup(self):
        c, shared = self.config, required(self.config.shared)
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.attention = self._mixer(shared.attention)
        self.mlp_norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.mlp = self._mixer(shared.mlp)

    def _mixer(self, name: str) -> Any:
        config = self.config.mixers[name]
        return computation_of(config).Module(config, self.dtype, self.cut.group(name))

    def __call__(
        self,
        both: jax.Array,
        adapters: Adapters,
        pass_: Pass[Any],
        state: Any,
        record: Any,
    ) -> tuple[jax.Array, Any, Any]:
        """Runs the block on the queried nodes. Returns its output, record and state, as
        described at `Pass`.

        Args:
          both: [B, Tq, 2 d], the residual stream and the embedding, concatenated.
          adapters: the calling layer's adapters.
          pass_: the forward pass.
          state, record: the state and record that the block's attention has in the
            calling layer.
        """
        u = self.norm(both)
        adapter = adapters.of_attention(u)
        a, record, state = self.attention(u, pass_, state, record, adapter)
        u = self.mlp_norm(a)
        return self.mlp(u, adapter=adapters.of_mlp(u))[0], record, state
