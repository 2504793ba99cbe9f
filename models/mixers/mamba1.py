"""The Mamba-1 mixer over the nodes of a tree (Gu and Dao 2023), as in Mamba, Falcon
Mamba and Jamba."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.base.tracing import traced_once
from stree_jax.models.configs.mamba1 import NORMS, Mamba1Config, mamba1_params
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, rms_norm, scaled_rms_norm
from stree_jax.models.layers.params import declare
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
