"""Mamba-1: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stree_jax import cpu_kernels
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mamba2 import init_dt_bias
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer
from stree_jax.models.configs.params import ONES, ZEROS, Param, Table, conv_init
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class Mamba1Config:
    """A Mamba-1 mixer.

    Attributes:
      d_inner: D, channels of the convolution and of the scan.
      dt_rank: R, width between the two projections of dt.
      d_state: N, states per channel.
      d_conv: K, taps of the convolution.
      norm: RMSNorm of dt (before its second projection), B and C. "plain" has no scale
        (Falcon Mamba), "scaled" has one (Jamba). If None, there is no norm.
      norm_eps: epsilon of these norms.
      proj_in_bias, proj_out_bias, conv_bias: True if the bias exists.
    """

    d_inner: int
    dt_rank: int
    d_state: int = 16
    d_conv: int = 4
    norm: Literal["plain", "scaled"] | None = None
    norm_eps: float = 1e-6
    proj_in_bias: bool = False
    proj_out_bias: bool = False
    conv_bias: bool = True

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of dt, B and C in x_proj."""
        return self.dt_rank, self.d_state, self.d_state


def init_A_log(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns log(1), .., log(N) for every channel (S4D-real), as Mamba does."""
    import jax.numpy as jnp

    each = jnp.arange(1, shape[1] + 1, dtype=jnp.float32)
    return jnp.broadcast_to(jnp.log(each)[None], shape).astype(dtype)


def mamba1_params(c: Mamba1Config, d_model: int) -> Table:
    """Returns the parameters by name.

    `in_proj` has the rows of x and z; `x_proj` those of dt, B and C. The projections
    that set the decays are small and never quantized: an error in a decay grows with
    every token.
    """
    inner = (Run(c.d_inner, c.d_inner),)
    table: Table = {
        "in_proj": Param((2 * c.d_inner, d_model), runs=inner * 2, quantizable=True),
        "conv_weight": Param((c.d_inner, c.d_conv), conv_init(c.d_conv), inner),
        "x_proj": Param((sum(c.widths), c.d_inner), runs=inner, axis=1),
        "dt_proj": Param((c.d_inner, c.dt_rank), runs=inner),
        "dt_bias": Param((c.d_inner,), init_dt_bias, inner, float32=True),
        "A_log": Param((c.d_inner, c.d_state), init_A_log, inner, float32=True),
        "D": Param((c.d_inner,), ONES, inner, float32=True),
        "out_proj": Param((d_model, c.d_inner), runs=inner, axis=1, quantizable=True),
    }
    if c.proj_in_bias:
        table["in_proj_bias"] = Param((2 * c.d_inner,), ZEROS, inner * 2)
    if c.conv_bias:
        table["conv_bias"] = Param((c.d_inner,), ZEROS, inner)
    if c.proj_out_bias:
        table["out_proj_bias"] = Param((d_model,), ZEROS)
    if c.norm == "scaled":
        for name, width in zip(NORMS, c.widths, strict=True):
            table[name] = Param((width,), ONES)
    return table


NORMS = ("dt_norm", "B_norm", "C_norm")  # scales of the norms of dt, B and C


class Mamba1(Mixer[Mamba1Config]):
    """The implementation of `mixer.Mixer` for Mamba-1."""

    kind = "mamba1"
    Config = Mamba1Config
    has_state = True

    def params(self, c: Mamba1Config, d_model: int) -> Table:
        return mamba1_params(c, d_model)

    def part(self, c: Mamba1Config, n: int) -> Mamba1Config:
        return replace(c, d_inner=c.d_inner // n)

    def conv_taps(self, c: Mamba1Config) -> int:
        return c.d_conv

    def state_arrays(
        self, c: Mamba1Config, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        ssm, conv = (batch, c.d_state, c.d_inner), (batch, c.d_conv - 1, c.d_inner)
        return {"ssm": (ssm, np.float32), "conv": (conv, dtype)}

    def record_arrays(
        self, c: Mamba1Config, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        inner = (batch, nodes, c.d_inner)
        return {
            "x": (inner, dtype),
            "dt": (inner, np.float32),
            "B": ((batch, nodes, c.d_state), np.float32),
            "inputs": (inner, dtype),
            "A": ((batch, 1, c.d_state, c.d_inner), np.float32),
        }

    def record_bytes(self, c: Mamba1Config, batch: int, nodes: int) -> int:
        tokens = nodes * (3 * c.d_inner + c.d_state)
        return FLOAT * batch * (tokens + c.d_state * c.d_inner)

    def work_bytes(self, c: Mamba1Config, batch: int, nodes: int, dtype: Any) -> int:
        # x, z, the output of the convolution, dt, y and the gated output.
        rows = padded_rows(batch * nodes) * 6 * c.d_inner
        states = batch * c.d_state * c.d_inner
        if cpu_kernels.level() is None:
            # XLA copies the states of all nodes, which the loop over nodes updates.
            states *= 2 if nodes == 1 else 3 * nodes + 4
        return FLOAT * (rows + states)


MAMBA1 = Mamba1()
