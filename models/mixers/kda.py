"""Kimi Delta Attention (Kimi Team 2025): the gated delta rule of `delta` with a decay
of its own for every key channel, as in Kimi-Linear and Ling-3."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import DeltaWeights
from stree_jax.models.base.shards import Run
from stree_jax.models.layers.mixer import FLOAT, MixerModule, padded_rows
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import Param, Table, declare
from stree_jax.models.mixers.delta import (
    CHANNEL_CHUNK,
    CHUNK,
    Delta,
    DeltaConfig,
    DeltaRecord,
    DeltaState,
    delta_params,
    in_kernel,
    mixed,
)
from stree_jax.models.mixers.mamba2 import init_A_log, init_dt_bias
from stree_jax.models.mixers.mlp import Activation
from stree_jax.models.weights.linear import as_row, linear, linear_summed


@dataclass(frozen=True)
class KDAConfig(DeltaConfig):
    """A Kimi Delta Attention mixer.

    Attributes:
      decay_rank: width between the two projections of the decays. If 0, there is one
        projection.
      gate_rank: the same for the output's gate.
      decay_bound: lower bound of the log decays, negative, which are
        decay_bound * sigmoid(exp(A_log) * (f + dt_bias)). If None, they are
        -exp(A_log) * softplus(f + dt_bias).
    """

    decay_rank: int = 0
    gate_rank: int = 0
    decay_bound: float | None = None

    @property
    def by_channel(self) -> bool:
        return True

    @property
    def gate(self) -> Activation:
        return "sigmoid"


def d_decay(c: DeltaConfig) -> int:
    """Returns the log decays of a token, if they are by channel."""
    return c.value_heads * c.key_dim


def kda_params(c: KDAConfig, d_model: int) -> Table:
    """Returns the parameters by name: those of `delta.delta_params`, and the
    projections of the decays and of the output's gate.

    As there, what sets a decay is never quantized. The rows of `in_proj` are q, k and
    v, and the output's gate if it has one projection; those of `gates` are b.
    """
    H = c.value_heads
    heads, decays = Run(H, H), Run(d_decay(c), H)
    table = delta_params(c, d_model)
    into: Param = table["in_proj"]
    qkv, inner = into.runs[:3], into.runs[3]
    if c.gate_rank:
        table["in_proj"] = into._replace(shape=(c.d_qkv, d_model), runs=qkv)
        table["gate_in"] = Param((c.gate_rank, d_model), quantizable=True)
        table["gate_out"] = Param(
            (c.d_inner, c.gate_rank), runs=(inner,), quantizable=True
        )
    if c.decay_rank:
        table["decay_in"] = Param((c.decay_rank, d_model))
    table["decay"] = Param((decays.width, c.decay_rank or d_model), runs=(decays,))
    table["gates"] = Param((H, d_model), runs=(heads,))
    table["dt_bias"] = Param((decays.width,), init_dt_bias, (decays,), float32=True)
    table["A_log"] = Param((H,), init_A_log, (heads,), float32=True)
    return table


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


class KDA(Delta):
    """The implementation of `mixer.Mixer` for Kimi Delta Attention."""

    kind = "kda"
    Config = KDAConfig
    Module = KDAModule

    def check(self, c: DeltaConfig, name: str) -> None:
        super().check(c, name)
        assert isinstance(c, KDAConfig)
        if c.decay_bound is not None and not -math.inf < c.decay_bound < 0:
            raise ValueError(f"{name}.decay_bound: {c.decay_bound} does not fit")

    def params(self, c: DeltaConfig, d_model: int) -> Table:
        assert isinstance(c, KDAConfig)
        return kda_params(c, d_model)

    def record_bytes(self, c: DeltaConfig, batch: int, nodes: int) -> int:
        decays = 0 if in_kernel(nodes) else FLOAT * batch * nodes * d_decay(c)
        return super().record_bytes(c, batch, nodes) + decays

    def work_bytes(self, c: DeltaConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows = padded_rows(batch * nodes)
        inputs = FLOAT * rows * (2 * d_decay(c) + c.d_inner)  # decays, and the gate
        pairs = 0
        if nodes > 1 and not in_kernel(nodes):
            others = nodes if nodes <= CHUNK else CHANNEL_CHUNK
            # Decays, and their products with keys and queries, of each pair of tokens.
            pairs = FLOAT * 3 * batch * nodes * others * d_decay(c)
        return super().work_bytes(c, batch, nodes, dtype) + inputs + pairs


KDA_MIXER = KDA()
