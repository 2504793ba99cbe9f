"""Mamba2: config, parameters, arrays of its state, memory."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import MAX_NODES
from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer, check_shared
from stree_jax.models.configs.params import ONES, ZEROS, Param, Table, conv_init
from stree_jax.models.weights.padding import padded_rows

CHUNK = 64  # tokens per chunk of `chunk_scan`


@dataclass(frozen=True)
class MambaConfig:
    """A Mamba2 mixer.

    Attributes:
      num_heads, head_dim, d_state, d_conv: H, P, N, K.
      n_groups: G, groups of C (and of B, unless x_heads is set).
      x_heads: MambaInLlama's grouped heads. x and B have this many heads and are
        repeated to num_heads after the convolution. If None, x has num_heads.
      d_mlp: width of a parallel gated MLP inside the mixer (native d_ssm). If 0, there
        is no MLP.
      norm: gated norm of the output. "gate_first" is norm(y * silu(z)), "norm_first" is
        norm(y) * silu(z), and None is y * silu(z).
      norm_groups: number of channel groups that are normed separately.
      norm_eps: epsilon of the norm.
      proj_in_bias, proj_out_bias, conv_bias: True if the bias exists.
      D_per_channel: True if D is [H * P] instead of [H].
      dt_limit: (low, high), clamp of dt after softplus.
      in_multiplier, out_multiplier: scales of the mixer's input and output.
      part_multipliers: scales of z, x, B, C, dt after in_proj (and its bias).
      norm_parts: number of devices that one group of the norm spans. It is 1 except in
        the config of one device's share (`Mamba2.part`).
    """

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int = 1
    d_conv: int = 4
    x_heads: int | None = None
    d_mlp: int = 0
    norm: Literal["gate_first", "norm_first"] | None = "gate_first"
    norm_groups: int = 1
    norm_eps: float = 1e-5
    proj_in_bias: bool = False
    proj_out_bias: bool = False
    conv_bias: bool = True
    D_per_channel: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0,) * 5
    norm_parts: int = 1

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of x, B and C, in the convolution's order."""
        C = self.n_groups * self.d_state
        if self.x_heads is None:
            return self.d_inner, C, C
        return self.x_heads * self.head_dim, self.x_heads * self.d_state, C

    @property
    def d_xBC(self) -> int:
        return sum(self.widths)

    @property
    def d_in_proj(self) -> int:
        """Rows of in_proj's weight: z0 and x0 (d_mlp each), z, x, B, C, dt."""
        return 2 * self.d_mlp + self.d_inner + self.d_xBC + self.num_heads


def init_A_log(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    import jax

    return jax.numpy.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def init_dt_bias(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Draws dt log-uniformly from 0.001 to 0.1 and returns its inverse softplus, as
    Mamba2 does."""
    import jax
    import jax.numpy as jnp

    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


def channel_runs(c: MambaConfig) -> dict[str, tuple[Run, ...]]:
    """Returns the channels of a mixer as runs of heads, groups or channels.

    The keys are "inner" (the channels of y), "heads" (one number per head), "xBC" (the
    channels of the convolution) and "first" (the channels of the MLP inside).
    """
    H, inside = c.num_heads, (Run(c.d_mlp, c.d_mlp),) if c.d_mlp else ()
    x, B, C = c.widths
    grouped = c.x_heads is not None
    own = c.x_heads or H
    return {
        "first": inside,
        "inner": (Run(c.d_inner, H),),
        "heads": (Run(H, H),),
        "xBC": (
            Run(x, own, grouped),
            Run(B, own if grouped else c.n_groups, True),
            Run(C, c.n_groups, True),
        ),
    }


def mamba_params(c: MambaConfig, d_model: int) -> Table:
    for shared in (c.n_groups, c.x_heads or c.num_heads):
        check_shared(c.num_heads, shared)
    parts = channel_runs(c)
    first, inner, heads, xBC = (parts[k] for k in ("first", "inner", "heads", "xBC"))
    into = 2 * first + inner + xBC + heads
    table = {
        "in_proj": Param((c.d_in_proj, d_model), runs=into, quantizable=True),
        "conv_weight": Param((c.d_xBC, c.d_conv), conv_init(c.d_conv), xBC),
        "dt_bias": Param((c.num_heads,), init_dt_bias, heads, float32=True),
        "A_log": Param((c.num_heads,), init_A_log, heads, float32=True),
        "D": Param((c.d_inner,), ONES, inner, float32=True)
        if c.D_per_channel
        else Param((c.num_heads,), ONES, heads, float32=True),
        "out_proj": Param(
            (d_model, c.d_inner + c.d_mlp), runs=first + inner, axis=1, quantizable=True
        ),
    }
    if c.proj_in_bias:
        table["in_proj_bias"] = Param((c.d_in_proj,), ZEROS, into)
    if c.conv_bias:
        table["conv_bias"] = Param((c.d_xBC,), ZEROS, xBC)
    if c.proj_out_bias:
        table["out_proj_bias"] = Param((d_model,), ZEROS)
    if c.norm is not None:
        table["norm"] = Param((c.d_inner,), ONES, inner)
    return table


class Mamba2(Mixer[MambaConfig]):
    """The implementation of `mixer.Mixer` for Mamba2."""

    kind = "mamba2"
    Config = MambaConfig
    has_state = True
    records_in_place = True
    long_chunks = False

    def check(self, c: MambaConfig, name: str) -> None:
        low, high = c.dt_limit
        if not 0 <= low <= high:
            raise ValueError(f"{name}.dt_limit: want 0 <= low <= high: {low}, {high}")

    def params(self, c: MambaConfig, d_model: int) -> Table:
        return mamba_params(c, d_model)

    def divides(self, c: MambaConfig, d_model: int, n: int) -> bool:
        groups = n if c.norm is None else c.norm_groups
        whole = groups % n == 0 or n % groups == 0
        return whole and super().divides(c, d_model, n)

    def part(self, c: MambaConfig, n: int) -> MambaConfig:
        return replace(
            c,
            num_heads=c.num_heads // n,
            n_groups=max(c.n_groups // n, 1),
            x_heads=None if c.x_heads is None else max(c.x_heads // n, 1),
            d_mlp=c.d_mlp // n,
            norm_groups=max(c.norm_groups // n, 1),
            norm_parts=1 if c.norm is None else max(n // c.norm_groups, 1),
        )

    def conv_taps(self, c: MambaConfig) -> int:
        return c.d_conv

    def state_arrays(
        self, c: MambaConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        ssm = (batch, c.num_heads, c.head_dim, c.d_state)
        conv = (batch, c.d_conv - 1, c.d_xBC)
        return {"ssm": (ssm, np.float32), "conv": (conv, dtype)}

    def record_arrays(
        self, c: MambaConfig, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        lead, H = (batch, nodes), c.num_heads
        groups = c.n_groups if c.x_heads is None else H
        return {
            "x": ((*lead, H, c.head_dim), dtype),
            "dt": ((*lead, H), np.float32),
            "a": ((*lead, H), np.float32),
            "B": ((*lead, groups, c.d_state), dtype),
            "xBC": ((*lead, c.d_xBC), dtype),
        }

    def record_bytes(self, c: MambaConfig, batch: int, nodes: int) -> int:
        # The convolution's output xBC, of which x, B and C are slices.
        return FLOAT * batch * nodes * c.d_xBC

    def work_bytes(self, c: MambaConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows = padded_rows(batch * nodes)
        in_kernel = cpu_kernels.level() is not None and nodes <= MAX_NODES
        if nodes == 1 or (in_kernel and c.x_heads is None):
            return FLOAT * rows * (c.d_in_proj + c.d_inner)
        decay = batch * c.num_heads * nodes * nodes
        # The scan holds x, the sums over nodes and over the state, and their factors.
        return FLOAT * (rows * (c.d_in_proj + 5 * c.d_inner) + decay)


MAMBA2 = Mamba2()
