"""Lightning attention: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import MAX_NODES
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mamba2 import CHUNK
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer
from stree_jax.models.configs.params import ONES, Param, Table
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class LightningConfig:
    """Lightning attention.

    Attributes:
      num_heads: H.
      head_dim: P, channels of a head of q, k and v.
      norm_eps: epsilon of the RMSNorm of the output, over all heads together.
    """

    num_heads: int
    head_dim: int
    norm_eps: float = 1e-6

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slopes of the heads, before they are scaled for a layer."""
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def init_slopes(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the slopes of a layer in the middle of a model."""
    import jax.numpy as jnp

    return 0.5 * jnp.asarray(alibi_slopes(shape[0]), dtype)


def lightning_params(c: LightningConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `in_proj` has the rows of q, k, v and of the output's gate, each of all heads.
    """
    H = c.num_heads
    inner = Run(c.d_inner, H)
    return {
        "in_proj": Param((4 * c.d_inner, d_model), runs=(inner,) * 4, quantizable=True),
        "slope": Param((H,), init_slopes, (Run(H, H),), float32=True),
        "norm": Param((c.d_inner,), ONES, (inner,)),
        "out_proj": Param(
            (d_model, c.d_inner), runs=(inner,), axis=1, quantizable=True
        ),
    }


class Lightning(Mixer[LightningConfig]):
    """The implementation of `mixer.Mixer` for lightning attention."""

    kind = "lightning"
    Config = LightningConfig
    has_state = True
    long_chunks = False

    def check(self, c: LightningConfig, name: str) -> None:
        if c.norm_eps <= 0:
            raise ValueError(f"{name}.norm_eps: {c.norm_eps} does not fit")

    def params(self, c: LightningConfig, d_model: int) -> Table:
        return lightning_params(c, d_model)

    def part(self, c: LightningConfig, n: int) -> LightningConfig:
        return replace(c, num_heads=c.num_heads // n)

    def state_arrays(
        self, c: LightningConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        kv = (batch, c.num_heads, c.head_dim, c.head_dim)
        return {"kv": (kv, np.float32)}

    def record_arrays(
        self, c: LightningConfig, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        lead = (batch, nodes, c.num_heads)
        kv = (*lead, c.head_dim)
        return {"k": (kv, dtype), "v": (kv, dtype), "a": (lead, np.float32)}

    def record_bytes(self, c: LightningConfig, batch: int, nodes: int) -> int:
        return FLOAT * batch * nodes * (2 * c.d_inner + c.num_heads)

    def work_bytes(self, c: LightningConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows = padded_rows(batch * nodes)
        if nodes == 1 or (cpu_kernels.level() is not None and nodes <= MAX_NODES):
            return FLOAT * rows * 5 * c.d_inner
        decay = batch * c.num_heads * nodes * min(nodes, CHUNK)
        # 4 d_inner for q, k, v and gate from `in_proj`, and 5 d_inner in the scan, as
        # in Mamba2: v, the sums over nodes and over the state, and each sum's factor.
        return FLOAT * (rows * 9 * c.d_inner + decay)


LIGHTNING = Lightning()
