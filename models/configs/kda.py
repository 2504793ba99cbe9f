"""Kimi Delta Attention: config, parameters, arrays of its state, memory."""

import math
from dataclasses import dataclass
from typing import Any

from stree_jax.models.base.shards import Run
from stree_jax.models.configs.delta import (
    CHANNEL_CHUNK,
    CHUNK,
    Delta,
    DeltaConfig,
    delta_params,
    in_kernel,
)
from stree_jax.models.configs.mamba2 import init_A_log, init_dt_bias
from stree_jax.models.configs.mixer import FLOAT
from stree_jax.models.configs.mlp import Activation
from stree_jax.models.configs.params import Param, Table
from stree_jax.models.weights.padding import padded_rows


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


class KDA(Delta):
    """The implementation of `mixer.Mixer` for Kimi Delta Attention."""

    kind = "kda"
    Config = KDAConfig

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
