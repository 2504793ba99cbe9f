"""Kimi Delta Attention (Kimi Team 2025): the gated delta rule of `delta` with a decay
of its own for every key channel, as in Kimi-Linear and Ling-3."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import DeltaWeights
from stree_jax.models.configs.kda import KDAConfig, kda_params
from stree_jax.models.layers.mixer import MixerModule
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.delta import DeltaRecord, DeltaState, mixed
from stree_jax.models.weights.linear import as_row, linear, linear_summed


def log_decays(
    f: jax.Array, dt_bias: jax.Array, A_log: jax.Array, c: KDAConfig
) -> jax.Array:
    """Computes the log decays of every key channel.

    Args:
      f: [B, T, H * N] float32, output of the projection of the decays.
      dt_bias: [H * N] float32.
      A_log: [H] float32.
      c: the config.

    Returns:
      [B, T, H * N] float32.
    """
    step = f + as_row(dt_bias.astype(jnp.float32), 3)
    rate = as_row(jnp.repeat(jnp.exp(A_log.astype(jnp.float32)), c.key_dim), 3)
    if c.decay_bound is None:
        return -rate * jax.nn.softplus(step)
    return c.decay_bound * jax.nn.sigmoid(rate * step)


class KDAModule(MixerModule):
    """Kimi Delta Attention: projections, convolution, delta rule, norm, gate,
    projection."""

    config: KDAConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[DeltaRecord],
        state: DeltaState,
        record: DeltaRecord | None,
    ) -> tuple[jax.Array, DeltaRecord, DeltaState]:
        """Runs the mixer on u [B, Tq, d] float32; see `Pass` for the contract."""
        c, valid_count = self.config, pass_.valid_count
        p = declare(self, kda_params(c, u.shape[-1]), self.dtype)

        def product(x: jax.Array, name: str) -> jax.Array:
            return linear(x, p[name], valid_count=valid_count)

        with jax.named_scope("in_proj"):
            qkvz = product(u, "in_proj")
            if c.gate_rank:
                z = product(product(u, "gate_in"), "gate_out")
                qkvz = jnp.concatenate([qkvz, z], axis=-1)
        with jax.named_scope("decays"):
            f = product(product(u, "decay_in") if c.decay_rank else u, "decay")
            a = log_decays(f, p["dt_bias"], p["A_log"], c)
            gates = jnp.concatenate([product(u, "gates"), a], axis=-1)
        weights = DeltaWeights(p["conv_weight"], p["norm"], None, None)
        y, record, state = mixed(c, qkvz, gates, weights, pass_, state, record)
        with jax.named_scope("out_proj"):
            out = linear_summed(y, p["out_proj"], None, self.parts, valid_count)
        return out, record, state
