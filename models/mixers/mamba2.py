"""The Mamba2 mixer over the nodes of a tree (Dao and Gu 2024).

With `MambaConfig.x_heads` it is MambaInLlama's variant.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import (
    MixerMemory,
    MixerTree,
    MixerWeights,
    cpu_kernel,
    mixer_outputs,
    mixer_unsupported,
)
from stree_jax.cpu_kernels.limits import MAX_NODES
from stree_jax.models.base.shards import MODEL, Group
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.configs.mamba2 import CHUNK, MAMBA2, MambaConfig, mamba_params
from stree_jax.models.layers.kernel_pass import by_kernel, reference
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.layers.norm import ScaledNorm, gated_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.weights.linear import as_row, linear, linear_summed, scaled
from stree_jax.pallas_kernels import (
    Replayed,
    ScanInputs,
    chunk_scan,
    commit_window,
    replay,
    replay_tree_scan,
    rounded_to,
    step_scan,
    tree_conv,
    tree_scan,
)


@struct.dataclass
class MambaState:
    """The state of a Mamba2 mixer.

    Attributes:
      ssm: [B, H, P, N] float32, the SSM state.
      conv: [B, K-1, C], the last K-1 inputs of the convolution.
    """

    ssm: jax.Array = leaf("state", part_axis=1)
    conv: jax.Array = leaf("window", part_axis=2)

    def commit(
        self, pending: "MixerPending[MambaRecord]", start: jax.Array
    ) -> "MambaState":
        """Replays an accepted path and returns the state after it."""
        return commit_mamba(self, pending)


@struct.dataclass
class MambaRecord:
    """The record of a Mamba2 mixer (see `layers.mixer`): the inputs of the convolution
    and of the SSM scan at the T nodes of a tree, from which any path can be replayed.

    Attributes:
      x: [B, T, H, P]. Inputs of the scan, as are dt, a and B; `pallas_kernels.scan`
        defines them.
      dt, a: [B, T, H] float32.
      B: [B, T, G, N].
      xBC: [B, T, C]. Inputs of the convolution.
    """

    x: jax.Array = leaf("record", part_axis=2)
    dt: jax.Array = leaf("record", part_axis=2)
    a: jax.Array = leaf("record", part_axis=2)
    B: jax.Array = leaf("record", part_axis=2)
    xBC: jax.Array = leaf("record", part_axis=2)


def replayed(pending: MixerPending[MambaRecord]) -> Replayed:
    """Returns a pending path as an argument of `pallas_kernels.replay`."""
    r = pending.record
    return Replayed(r.x, r.dt, r.a, r.B, pending.path, pending.length)


@traced_once
def commit_mamba(state: MambaState, pending: MixerPending[MambaRecord]) -> MambaState:
    """Replays the accepted path into the SSM state and the convolution's window."""
    ssm, xBC = replay(state.ssm, replayed(pending)), pending.record.xBC
    return MambaState(ssm, commit_window(state.conv, xBC, pending.path, pending.length))


class Mamba2Module(MixerModule):
    """Mamba2: projection, convolution, scan, gated norm, projection."""

    config: MambaConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[MambaRecord],
        state: MambaState,
        record: MambaRecord | None,
    ) -> tuple[jax.Array, MambaRecord, MambaState]:
        """Runs the mixer on the queried nodes.

        Args:
          u: [B, Tq, d] float32. Input of the queried nodes.
          pass_, state, record: as described at `Pass`.

        Returns:
          The output [B, Tq, d] float32, the record of all nodes, and the state after
          the pending path.
        """
        c = self.config
        p = declare(self, mamba_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            u = scaled(u, c.in_multiplier)
            valid_count = pass_.valid_count
            first = p["in_proj"], p.get("in_proj_bias")
            zxbcdt = linear(u, *first, valid_count=valid_count)
            zxbcdt = scaled_parts(zxbcdt, c)
        weights = MixerWeights(
            p["conv_weight"],
            p.get("conv_bias"),
            p.get("norm"),
            *(p[name].astype(jnp.float32) for name in ("dt_bias", "A_log", "D")),
        )
        args = zxbcdt, weights, pass_, state, record
        y, record, state = mixed(c, *args, axis=self.parts.axis)
        with jax.named_scope("out_proj"):
            if c.d_mlp:
                z0, x0, _ = jnp.split(zxbcdt, [c.d_mlp, 2 * c.d_mlp], axis=-1)
                y = jnp.concatenate([jax.nn.silu(z0) * x0, y], axis=-1)
            last = p["out_proj"], p.get("out_proj_bias")
            out = linear_summed(y, *last, self.parts, valid_count)
        return scaled(out, c.out_multiplier), record, state


Mixed = tuple[jax.Array, MambaRecord, MambaState]


def mixed(
    c: MambaConfig,
    zxbcdt: jax.Array,
    weights: MixerWeights,
    pass_: Pass[MambaRecord],
    state: MambaState,
    record: MambaRecord | None,
    *,
    axis: str = MODEL,
) -> Mixed:
    """Runs the mixer between its two projections, with the CPU kernel if it supports
    the arguments and `equations` otherwise.

    Args:
      c: the config.
      zxbcdt: [B, Tq, W] float32, output of in_proj for the queried nodes.
      weights: the weights between the projections.
      pass_, state, record: see `Pass`.
      axis: mesh axis of the devices that share the mixer.

    Returns:
      The input of out_proj [B, Tq, H * P] float32, the record and the state.
    """
    arrays, found = (zxbcdt, weights), None
    if c.x_heads is None and c.norm_parts == 1:
        found = by_kernel(
            *(mixer_kernel, arrays, c, pass_, state, record),
            memory=MixerMemory,
            record_type=MambaRecord,
            mixer=MAMBA2,
        )
    if found is None:
        return equations(c, zxbcdt, weights, pass_, state, record, axis=axis)
    return found


def _attributes(config: MambaConfig, **options: Any) -> dict[str, Any]:
    least, most = config.dt_limit
    return dict(
        to_z=2 * config.d_mlp,  # first output of in_proj that is z; xBC and dt follow
        norm_groups=config.norm_groups,
        norm_first=config.norm == "norm_first",
        eps=float(config.norm_eps),
        least_dt=float(least),
        most_dt=float(most),
    )


@cpu_kernel(
    "stree_mixer",
    outputs=mixer_outputs,
    unsupported=mixer_unsupported,
    shared=("weights", "tree.rows"),
    aliases={"memory": 1},
    attributes=_attributes,
)
def mixer_kernel(
    zxbcdt: jax.Array,
    weights: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    **options: Any,
) -> tuple[jax.Array, MixerMemory]:
    """Replays the pending path and computes the mixer on a tree; see `reference`.

    Args:
      zxbcdt, weights: as in `mixed`.
      memory, tree, **options: as in `reference`.
    """
    arrays, kinds = (zxbcdt, weights), (MambaState, MambaRecord)
    return reference(equations, arrays, memory, tree, kinds, **options)


def equations(
    c: MambaConfig,
    zxbcdt: jax.Array,
    weights: MixerWeights,
    pass_: Pass[MambaRecord],
    state: MambaState,
    record: MambaRecord | None,
    *,
    axis: str = MODEL,
) -> Mixed:
    """Computes the Mamba2 mixer between its two projections in plain JAX: convolution,
    SSM scan and gated norm. Arguments and results are those of `mixed`, which uses a
    CPU kernel where it can."""
    pending, zxbcdt = pass_.pending, pass_.nodes_only(zxbcdt)
    with jax.named_scope("steps"):
        z, xBC, dt = split_in_proj(zxbcdt, c)
        dt = jax.nn.softplus(dt + as_row(weights.dt_bias, 3))
        dt = jnp.clip(dt, *c.dt_limit)  # [B, Tq, H]
        a = dt * -jnp.exp(as_row(weights.A_log, 3))

    with jax.named_scope("conv"):
        conv0 = state.conv
        if pending is not None:
            last = pending.record.xBC
            conv0 = commit_window(conv0, last, pending.path, pending.length)
        xBC = rounded_to(xBC, conv0.dtype)
        inputs = pass_.merged(None if record is None else record.xBC, xBC)
        window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
        bias = weights.conv_bias if c.conv_bias else None
        convolved = tree_conv(inputs, weights.conv_weight, bias, conv0, window)
        x, B, C = split_heads(rounded_to(jax.nn.silu(convolved), conv0.dtype), c)

    with jax.named_scope("scan"):
        # XLA would compute these twice, for the record and for the scan, and the two
        # could differ in their last bits.
        new = jax.lax.optimization_barrier(MambaRecord(x, dt, a, B, xBC))
        record = pass_.merged(record, new)
        r, D = record, weights.D
        past = None if pending is None else replayed(pending)
        scanned = ScanInputs(r.x, r.dt, r.a, r.B, C, D)
        y, ssm = scan_nodes(scanned, state.ssm, pass_.nodes, pass_.rows, past)

    with jax.named_scope("norm"):
        scale = None if c.norm is None else weights.norm
        neighbours = Group(c.norm_parts, axis)
        norm = ScaledNorm(c.norm_eps, c.norm_groups, neighbours)
        y = gated_norm(y.reshape(*z.shape), z, scale, norm, c.norm == "gate_first")
    return y, record, MambaState(ssm, conv0)


def scaled_parts(zxbcdt: jax.Array, c: MambaConfig) -> jax.Array:
    """Multiplies each of z, x, B, C and dt in the output of in_proj by its scale."""
    if c.part_multipliers == (1.0,) * 5:
        return zxbcdt
    sizes = [c.d_inner, *c.widths, c.num_heads]
    scales = np.repeat(np.array(c.part_multipliers, np.float32), sizes)
    return zxbcdt * as_row(jnp.asarray(scales), 3)


def split_in_proj(zxbcdt: jax.Array, c: MambaConfig) -> list[jax.Array]:
    """Splits the output of in_proj into z [B, T, H * P], xBC [B, T, C] and dt
    [B, T, H].

    The channels of the MLP inside, which come first, are dropped.
    """
    first = 2 * c.d_mlp
    parts = np.cumsum([first, c.d_inner, c.d_xBC])
    return jnp.split(zxbcdt, parts, axis=-1)[1:]


def split_heads(
    xBC: jax.Array, c: MambaConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the convolution's output into x [B, T, H, P], B and C [B, T, G, N]."""
    lead = xBC.shape[:2]
    x, B, C = jnp.split(xBC, np.cumsum(c.widths)[:-1], axis=-1)
    x = x.reshape(*lead, -1, c.head_dim)
    B = B.reshape(*lead, -1, c.d_state)
    C = C.reshape(*lead, -1, c.d_state)
    if c.x_heads is not None:
        repeats = c.num_heads // c.x_heads
        x, B = jnp.repeat(x, repeats, axis=2), jnp.repeat(B, repeats, axis=2)
    return x, B, C


def scan_nodes(
    inputs: ScanInputs,
    h0: jax.Array,
    nodes: Nodes,
    rows: jax.Array | None,
    past: Replayed | None,
) -> tuple[jax.Array, jax.Array]:
    """Scans the tree's nodes, after replaying the pending path.

    Args:
      inputs: scan inputs of all T nodes; C of the queried ones.
      h0: [B, H, P, N] float32, state before the pending path.
      nodes, rows: the topology, and the queried nodes; see `Pass`.
      past: the pending path. If None, there is no path to replay.

    Returns:
      y [B, Tq, H, P] float32 of the queried nodes, and the state [B, H, P, N] float32
      after the pending path.
    """
    known = rows is None and nodes.scan in ("tree", "chain")
    if known and cpu_kernels.level() is not None and nodes.mask.shape[1] <= MAX_NODES:
        # A chain, too: the kernel's results do not depend on what is read together.
        return replay_tree_scan(h0, past or no_path(inputs), inputs, nodes.mask)
    if past is not None and nodes.scan == "tree":
        return replay_tree_scan(h0, past, inputs, nodes.mask)
    if past is not None:  # a chain during prefill: replay the previous chunk
        h0 = replay(h0, past)
    if nodes.scan == "step":
        return step_scan(inputs, h0), h0
    long = inputs.C.shape[1] > CHUNK
    if nodes.scan == "chunk" or (nodes.scan == "chain" and long):
        return chunk_scan(inputs, h0, CHUNK), h0
    return tree_scan(inputs, h0, nodes.mask, rows), h0


def no_path(inputs: ScanInputs) -> Replayed:
    """Returns a path of length 0."""
    x, dt, a, B = (z[:, :1] for z in (inputs.x, inputs.dt, inputs.a, inputs.B))
    path = jnp.zeros((x.shape[0], 1), jnp.int32)
    return Replayed(x, dt, a, B, path, path[:, 0])
