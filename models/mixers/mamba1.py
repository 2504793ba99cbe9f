"""The Mamba-1 mixer over the nodes of a tree (Gu and Dao 2023), as in Mamba, Falcon
Mamba and Jamba."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.models.base.shards import Run
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.layers.mixer import (
    FLOAT,
    Mixer,
    MixerModule,
    MixerPending,
    leaf,
    padded_rows,
)
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, rms_norm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, ZEROS, Param, Table, conv_init, declare
from stree_jax.models.mixers.mamba2 import init_dt_bias
from stree_jax.models.weights.linear import as_row, linear, linear_summed
from stree_jax.pallas_kernels import (
    SelectiveInputs,
    SelectiveReplayed,
    commit_window,
    parents_of,
    rounded_to,
    selective_replay,
    selective_replay_scan,
    tree_conv,
)


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


@struct.dataclass
class Mamba1State:
    """The state of a Mamba-1 mixer.

    Attributes:
      ssm: [B, N, D] float32, the transpose of transformers' state.
      conv: [B, K-1, D], the last K-1 inputs of the convolution.
    """

    ssm: jax.Array = leaf("state", part_axis=2)
    conv: jax.Array = leaf("window", part_axis=2)

    def commit(
        self, pending: "MixerPending[Mamba1Record]", start: jax.Array
    ) -> "Mamba1State":
        """Returns the state after an accepted path; see `mixer.MixerState`."""
        return commit_mamba1(self, pending)


@struct.dataclass
class Mamba1Record:
    """The record of a Mamba-1 mixer (see `layers.mixer`) for the T nodes of a tree.

    Attributes:
      x: [B, T, D], output of the convolution.
      dt: [B, T, D] float32, step sizes after softplus.
      B: [B, T, N] float32.
      inputs: [B, T, D], inputs of the convolution.
      A: [B, 1, N, D] float32, the decays, which are parameters: a replay is not given
        them.
    """

    x: jax.Array = leaf("record", part_axis=2)
    dt: jax.Array = leaf("record", part_axis=2)
    B: jax.Array = leaf("record")
    inputs: jax.Array = leaf("record", part_axis=2)
    A: jax.Array = leaf("record", part_axis=3)


def replayed(pending: MixerPending[Mamba1Record]) -> SelectiveReplayed:
    """Returns a pending path as an argument of `pallas_kernels.selective_replay`."""
    r = pending.record
    return SelectiveReplayed(r.x, r.dt, r.B, pending.path, pending.length)


@traced_once
def commit_mamba1(
    state: Mamba1State, pending: MixerPending[Mamba1Record]
) -> Mamba1State:
    """Replays the accepted path into the SSM state and the convolution's window."""
    ssm = selective_replay(state.ssm, replayed(pending), pending.record.A[:, 0])
    inputs, path = pending.record.inputs, pending.path
    conv = commit_window(state.conv, inputs, path, pending.length)
    return Mamba1State(ssm, conv)


def init_A_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns log(1), .., log(N) for every channel (S4D-real), as Mamba does."""
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


class Mamba1Module(MixerModule):
    """Mamba-1: projection, convolution, selective scan, gate, projection."""

    config: Mamba1Config

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[Mamba1Record],
        state: Mamba1State,
        record: Mamba1Record | None,
    ) -> tuple[jax.Array, Mamba1Record, Mamba1State]:
        """Runs the mixer on u [B, Tq, d] float32; see `Pass` for the contract."""
        c, valid_count = self.config, pass_.valid_count
        p = declare(self, mamba1_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            first = p["in_proj"], p.get("in_proj_bias")
            xz = pass_.nodes_only(linear(u, *first, valid_count=valid_count))
            new, z = jnp.split(xz, 2, axis=-1)

        with jax.named_scope("conv"):
            conv0, pending = state.conv, pass_.pending
            if pending is not None:
                past = pending.record.inputs
                conv0 = commit_window(conv0, past, pending.path, pending.length)
            new = rounded_to(new, conv0.dtype)
            inputs = pass_.merged(None if record is None else record.inputs, new)
            window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
            weights = p["conv_weight"], p.get("conv_bias")
            x = jax.nn.silu(tree_conv(inputs, *weights, conv0, window))
            x = rounded_to(x, conv0.dtype)

        with jax.named_scope("steps"):
            dtBC = linear_summed(x, p["x_proj"], None, self.parts, valid_count)
            dt, B, C = normed(pass_.nodes_only(dtBC), p, c)
            dt = linear(dt, p["dt_proj"], valid_count=valid_count)
            dt = jax.nn.softplus(pass_.nodes_only(dt) + as_row(p["dt_bias"], 3))
            # See `mamba2.equations`.
            x, dt, B, C = jax.lax.optimization_barrier((x, dt, B, C))

        with jax.named_scope("scan"):
            parts = None if record is None else (record.x, record.dt, record.B)
            x, dt, B = pass_.merged(parts, (x, dt, B))
            A = -jnp.exp(p["A_log"].astype(jnp.float32).T)
            A = jax.lax.optimization_barrier(jnp.broadcast_to(A[None], state.ssm.shape))
            scanned = SelectiveInputs(x, dt, B, C, A, p["D"].astype(jnp.float32))
            y, ssm = scan_nodes(scanned, state.ssm, pass_)

        with jax.named_scope("out_proj"):
            last = p["out_proj"], p.get("out_proj_bias")
            y = y * jax.nn.silu(z)
            out = linear_summed(y, *last, self.parts, valid_count)
        record = Mamba1Record(x, dt, B, inputs, A[:, None])
        return out, record, Mamba1State(ssm, conv0)


def normed(
    dtBC: jax.Array, p: dict[str, Any], c: Mamba1Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the output of x_proj [B, T, R + 2 N] into dt [B, T, R], B and C
    [B, T, N], and norms each as the config says."""
    dt, B, C = jnp.split(dtBC, [c.dt_rank, c.dt_rank + c.d_state], axis=-1)
    if c.norm is None:
        return dt, B, C
    if c.norm == "plain":
        dt, B, C = (rms_norm(part, c.norm_eps) for part in (dt, B, C))
        return dt, B, C
    norm = ScaledNorm(c.norm_eps)
    named = zip((dt, B, C), NORMS, strict=True)
    dt, B, C = (scaled_rms_norm(part, p[name], norm) for part, name in named)
    return dt, B, C


def scan_nodes(
    inputs: SelectiveInputs, h0: jax.Array, pass_: Pass[Mamba1Record]
) -> tuple[jax.Array, jax.Array]:
    """Scans the tree's nodes, after replaying the pending path.

    Args:
      inputs: scan inputs of all T nodes; C of the queried ones.
      h0: [B, N, D] float32, state before the pending path.
      pass_: the forward pass.

    Returns:
      y [B, Tq, D] float32 of the queried nodes, and the state [B, N, D] float32 after
      the pending path.
    """
    nodes, pending = pass_.nodes, pass_.pending
    if pending is None:
        # The kernel always takes a path.
        none = jnp.zeros((h0.shape[0], 1), jnp.int32)
        x, dt, B = (z[:, :1] for z in (inputs.x, inputs.dt, inputs.B))
        past = SelectiveReplayed(x, dt, B, none, none[:, 0])
    else:
        past = replayed(pending)
    y, h = selective_replay_scan(
        *(h0, past, inputs, parents_of(nodes.mask), pass_.rows),
        chain=nodes.scan != "tree" and pass_.rows is None,
        replays=pending is not None,
    )
    return y, h0 if pending is None else h


class Mamba1(Mixer[Mamba1Config]):
    """The implementation of `mixer.Mixer` for Mamba-1."""

    kind = "mamba1"
    Config = Mamba1Config
    Module = Mamba1Module
    State = Mamba1State
    Record = Mamba1Record

    def params(self, c: Mamba1Config, d_model: int) -> Table:
        return mamba1_params(c, d_model)

    def part(self, c: Mamba1Config, n: int) -> Mamba1Config:
        return replace(c, d_inner=c.d_inner // n)

    def conv_taps(self, c: Mamba1Config) -> int:
        return c.d_conv

    def init_state(
        self, c: Mamba1Config, batch: int, capacity: int, dtype: Any
    ) -> Mamba1State:
        ssm = jnp.zeros((batch, c.d_state, c.d_inner), jnp.float32)
        conv = jnp.zeros((batch, c.d_conv - 1, c.d_inner), dtype)
        return Mamba1State(ssm, conv)

    def empty_record(
        self, c: Mamba1Config, batch: int, nodes: int, dtype: Any
    ) -> Mamba1Record:
        lead, inner = (batch, nodes), (batch, nodes, c.d_inner)
        x, inputs = jnp.zeros(inner, dtype), jnp.zeros(inner, dtype)
        dt = jnp.zeros(inner, jnp.float32)
        B = jnp.zeros((*lead, c.d_state), jnp.float32)
        A = jnp.zeros((batch, 1, c.d_state, c.d_inner), jnp.float32)
        return Mamba1Record(x, dt, B, inputs, A)

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
