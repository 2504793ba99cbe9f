"""The Mamba2 mixer over the nodes of a tree (Dao and Gu 2024).

With `MambaConfig.x_heads` it is MambaInLlama's variant.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from stree_jax.cpu_kernels.scan import MAX_NODES
from stree_jax.models.base.shards import MODEL, Group, Run
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.layers.kernel_pass import by_kernel, reference
from stree_jax.models.layers.mixer import (
    FLOAT,
    Mixer,
    MixerModule,
    MixerPending,
    leaf,
    padded_rows,
)
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.layers.norm import ScaledNorm, gated_norm
from stree_jax.models.layers.params import ONES, ZEROS, Param, Table, conv_init, declare
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


def init_A_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws dt log-uniformly from 0.001 to 0.1 and returns its inverse softplus, as
    Mamba2 does."""
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
            empty=MAMBA2.empty_record,
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


class Mamba2(Mixer[MambaConfig]):
    """The implementation of `mixer.Mixer` for Mamba2."""

    kind = "mamba2"
    Config = MambaConfig
    Module = Mamba2Module
    State = MambaState
    Record = MambaRecord
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

    def init_state(
        self, c: MambaConfig, batch: int, capacity: int, dtype: Any
    ) -> MambaState:
        ssm = (batch, c.num_heads, c.head_dim, c.d_state)
        conv = (batch, c.d_conv - 1, c.d_xBC)
        return MambaState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))

    def empty_record(
        self, c: MambaConfig, batch: int, nodes: int, dtype: Any
    ) -> MambaRecord:
        def zeros(*shape: int, dtype: Any = dtype) -> jax.Array:
            return jnp.zeros((batch, nodes, *shape), dtype)

        return MambaRecord(
            x=zeros(c.num_heads, c.head_dim),
            dt=zeros(c.num_heads, dtype=jnp.float32),
            a=zeros(c.num_heads, dtype=jnp.float32),
            B=zeros(c.n_groups if c.x_heads is None else c.num_heads, c.d_state),
            xBC=zeros(c.d_xBC),
        )

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
