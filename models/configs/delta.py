"""Gated DeltaNet: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import MAX_NODES
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mamba2 import init_A_log, init_dt_bias
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer
from stree_jax.models.configs.mlp import Activation
from stree_jax.models.configs.params import ONES, Param, Table, conv_init
from stree_jax.models.weights.padding import padded_rows

CHUNK = 64  # tokens per chunk of `delta_chunks`


# The same if decays are by channel: then a pair of tokens has a decay for each of them.
CHANNEL_CHUNK = 16


@dataclass(frozen=True)
class DeltaConfig:
    """A Gated DeltaNet mixer. `kda.KDAConfig` has the same attributes and more.

    Attributes:
      key_heads, key_dim: G, N, heads of q and k and their size.
      value_heads, value_dim: H, P, heads of v and their size. Value head h reads key
        head h // (H / G).
      d_conv: K, taps of the convolution over q, k and v.
      norm_eps: epsilon of the RMSNorm of each head's output.
      beta_max: largest strength of a write, 1, or 2 to let the state change its sign
        (OLMo-Hybrid).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int = 4
    norm_eps: float = 1e-6
    beta_max: float = 1.0

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"key_heads: {self.key_heads} do not divide {self.value_heads} value "
                "heads"
            )

    @property
    def by_channel(self) -> bool:
        """True if every key channel of a head has its own decay."""
        return False

    @property
    def gate(self) -> Activation:
        """Activation of the output's gate."""
        return "silu"

    @property
    def d_key(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def d_inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def d_qkv(self) -> int:
        """C, channels of the convolution: q, k and v in this order."""
        return 2 * self.d_key + self.d_inner

    @property
    def decays(self) -> tuple[int, ...]:
        """The shape of a token's log decays: (H,), or (H, N) if `by_channel`."""
        return (self.value_heads, self.key_dim)[: 1 + self.by_channel]


def delta_params(c: DeltaConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `in_proj` has the rows of q, k, v and z; `gates` those of b and a, which set the
    strength of the write and the decay. The latter are few and never quantized: an
    error in a decay grows with every token.
    """
    H, inner = c.value_heads, Run(c.d_inner, c.value_heads)
    key = Run(c.d_key, c.key_heads, True)
    qkv, heads = (key, key, inner), (Run(H, H),)
    rows = c.d_qkv + c.d_inner
    return {
        "in_proj": Param((rows, d_model), runs=(*qkv, inner), quantizable=True),
        "gates": Param((2 * H, d_model), runs=2 * heads),
        "conv_weight": Param((c.d_qkv, c.d_conv), conv_init(c.d_conv), qkv),
        "dt_bias": Param((H,), init_dt_bias, heads, float32=True),
        "A_log": Param((H,), init_A_log, heads, float32=True),
        "norm": Param((c.value_dim,), ONES),
        "out_proj": Param(
            (d_model, c.d_inner), runs=(inner,), axis=1, quantizable=True
        ),
    }


def in_kernel(nodes: int) -> bool:
    """True if the CPU kernel computes a tree of this many nodes."""
    return cpu_kernels.level() is not None and nodes <= MAX_NODES


class Delta(Mixer[DeltaConfig]):
    """The implementation of `mixer.Mixer` for Gated DeltaNet."""

    kind = "delta"
    Config = DeltaConfig
    has_state = True
    records_in_place = True
    long_chunks = False

    def check(self, c: DeltaConfig, name: str) -> None:
        if c.value_heads % c.key_heads:
            raise ValueError(
                f"{name}.value_heads: {c.value_heads} is not a multiple of "
                f"key_heads {c.key_heads}"
            )

    def params(self, c: DeltaConfig, d_model: int) -> Table:
        return delta_params(c, d_model)

    def part(self, c: DeltaConfig, n: int) -> DeltaConfig:
        keys, values = max(c.key_heads // n, 1), c.value_heads // n
        return replace(c, key_heads=keys, value_heads=values)

    def conv_taps(self, c: DeltaConfig) -> int:
        return c.d_conv

    def state_arrays(
        self, c: DeltaConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        ssm = (batch, c.value_heads, c.value_dim, c.key_dim)
        conv = (batch, c.d_conv - 1, c.d_qkv)
        return {"ssm": (ssm, np.float32), "conv": (conv, dtype)}

    def record_arrays(
        self, c: DeltaConfig, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        lead = (batch, nodes)
        return {
            "u": ((*lead, c.value_heads, c.value_dim), np.float32),
            "k": ((*lead, c.key_heads, c.key_dim), dtype),
            "k_scale": ((*lead, c.key_heads), np.float32),
            "a": ((*lead, *c.decays), np.float32),
            "qkv": ((*lead, c.d_qkv), dtype),
        }

    def record_bytes(self, c: DeltaConfig, batch: int, nodes: int) -> int:
        # The kernel writes the record over the last one.
        return 0 if in_kernel(nodes) else FLOAT * batch * nodes * (c.d_inner + c.d_qkv)

    def work_bytes(self, c: DeltaConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows = padded_rows(batch * nodes)
        if nodes == 1 or in_kernel(nodes):
            return FLOAT * rows * (c.d_qkv + 2 * c.d_inner)
        weights = batch * c.value_heads * nodes * nodes
        # q, k, v, z and the carried parts of k and q; the decays or the scores.
        return FLOAT * (rows * (c.d_qkv + 4 * c.d_inner) + weights)


DELTA = Delta()
