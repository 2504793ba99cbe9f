"""The gated delta rule over the nodes of a tree: Gated DeltaNet (Yang, Kautz and
Hatamizadeh 2025), as in Qwen3-Next and Qwen3.5."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import (
    DeltaMemory,
    DeltaWeights,
    MixerTree,
    cpu_kernel,
    delta_outputs,
    delta_unsupported,
)
from stree_jax.cpu_kernels.mixer import MAX_NODES
from stree_jax.models.base.shards import Run
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
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, Param, Table, conv_init, declare
from stree_jax.models.mixers.mamba2 import init_A_log, init_dt_bias
from stree_jax.models.mixers.mlp import Activation, activate
from stree_jax.models.weights.linear import as_row, linear, linear_summed, scaled
from stree_jax.pallas_kernels import (
    DeltaInputs,
    DeltaReplayed,
    commit_window,
    delta_chunks,
    delta_replay,
    delta_replay_scan,
    delta_scan,
    delta_steps,
    rounded_to,
    tree_conv,
)

CHUNK = 64  # tokens per chunk of `delta_chunks`
# The same if decays are by channel: then a pair of tokens has a decay for each of them.
CHANNEL_CHUNK = 16
L2_EPS = 1e-6  # epsilon of the norms of q and k, the same in every implementation


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


@struct.dataclass
class DeltaState:
    """The state of a Gated DeltaNet mixer.

    Attributes:
      ssm: [B, H, P, N] float32, the memory: the transpose of transformers' state.
      conv: [B, K-1, C], the last K-1 inputs of the convolution.
    """

    ssm: jax.Array = leaf("state", part_axis=1)
    conv: jax.Array = leaf("window", part_axis=2)

    def commit(
        self, pending: "MixerPending[DeltaRecord]", start: jax.Array
    ) -> "DeltaState":
        """Replays an accepted path and returns the state after it."""
        return commit_delta(self, pending)


@struct.dataclass
class DeltaRecord:
    """The record of a Gated DeltaNet mixer (see `layers.mixer`) for the T nodes of a
    tree.

    Attributes:
      u: [B, T, H, P] float32, what the nodes write (`pallas_kernels.delta`). A node's u
        depends on its path and on the committed state, and is computed once.
      k: [B, T, G, N], keys after the convolution, not normalized.
      k_scale: [B, T, G] float32, the factor that normalizes a key.
      a: [B, T, H] float32, log decays; [B, T, H, N] if they are by channel.
      qkv: [B, T, C], inputs of the convolution.
    """

    u: jax.Array = leaf("record", part_axis=2)
    k: jax.Array = leaf("record", part_axis=2)
    k_scale: jax.Array = leaf("record", part_axis=2)
    a: jax.Array = leaf("record", part_axis=2)
    qkv: jax.Array = leaf("record", part_axis=2)


def replayed(pending: MixerPending[DeltaRecord]) -> DeltaReplayed:
    """Returns a pending path as an argument of `pallas_kernels.delta_replay`."""
    r = pending.record
    return DeltaReplayed(r.u, r.k, r.k_scale, r.a, pending.path, pending.length)


@traced_once
def commit_delta(state: DeltaState, pending: MixerPending[DeltaRecord]) -> DeltaState:
    """Replays the accepted path into the state and the convolution's window."""
    ssm, qkv = delta_replay(state.ssm, replayed(pending)), pending.record.qkv
    return DeltaState(ssm, commit_window(state.conv, qkv, pending.path, pending.length))


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


class DeltaModule(MixerModule):
    """Gated DeltaNet: projections, convolution, delta rule, gated norm, projection."""

    config: DeltaConfig

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
        p = declare(self, delta_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            qkvz = linear(u, p["in_proj"], valid_count=valid_count)
            gates = linear(u, p["gates"], valid_count=valid_count)
        weights = DeltaWeights(
            p["conv_weight"],
            p["norm"],
            *(p[name].astype(jnp.float32) for name in ("dt_bias", "A_log")),
        )
        y, record, state = mixed(c, qkvz, gates, weights, pass_, state, record)
        with jax.named_scope("out_proj"):
            out = linear_summed(y, p["out_proj"], None, self.parts, valid_count)
        return out, record, state


Mixed = tuple[jax.Array, DeltaRecord, DeltaState]


def mixed(
    c: DeltaConfig,
    qkvz: jax.Array,
    gates: jax.Array,
    weights: DeltaWeights,
    pass_: Pass[DeltaRecord],
    state: DeltaState,
    record: DeltaRecord | None,
) -> Mixed:
    """Runs the mixer between its projections, with the CPU kernel if it supports the
    arguments and `equations` otherwise. Arguments and results are those of
    `equations`."""
    found = by_kernel(
        *(delta_kernel, (qkvz, gates, weights), c, pass_, state, record),
        memory=DeltaMemory,
        empty=DELTA.empty_record,
    )
    if found is None:
        return equations(c, qkvz, gates, weights, pass_, state, record)
    return found


def _attributes(config: DeltaConfig, **options: Any) -> dict[str, Any]:
    return dict(
        eps=float(config.norm_eps),
        beta_max=float(config.beta_max),
        sigmoid=config.gate == "sigmoid",
    )


def _arrays(
    qkvz: jax.Array, gates: jax.Array, weights: DeltaWeights, *rest: Any, **options: Any
) -> tuple[Any, ...]:
    """Replaces weights that are None by empty arrays of their dtype."""
    if weights.A_log is None:
        none = jnp.zeros((0,), jnp.float32)
        weights = weights._replace(dt_bias=none, A_log=none)
    return qkvz, gates, weights, *rest


@cpu_kernel(
    "stree_delta",
    outputs=delta_outputs,
    unsupported=delta_unsupported,
    shared=("weights", "tree.rows"),
    aliases={"memory": 1},
    attributes=_attributes,
    prepare=_arrays,
)
def delta_kernel(
    qkvz: jax.Array,
    gates: jax.Array,
    weights: DeltaWeights,
    memory: DeltaMemory,
    tree: MixerTree,
    **options: Any,
) -> tuple[jax.Array, DeltaMemory]:
    """Replays the pending path and computes the mixer on a tree; see `reference`.

    Args:
      qkvz, gates, weights: as in `equations`.
      memory, tree, **options: as in `reference`.
    """
    arrays, kinds = (qkvz, gates, weights), (DeltaState, DeltaRecord)
    return reference(equations, arrays, memory, tree, kinds, **options)


def equations(
    c: DeltaConfig,
    qkvz: jax.Array,
    gates: jax.Array,
    weights: DeltaWeights,
    pass_: Pass[DeltaRecord],
    state: DeltaState,
    record: DeltaRecord | None,
) -> Mixed:
    """Computes the mixer between its projections in plain JAX: convolution, delta rule
    and gated norm.

    Args:
      c: the config.
      qkvz: [B, Tq, C + H * P] float32, output of in_proj for the queried nodes.
      gates: [B, Tq, 2 H] float32, b and a of each head. If `c.by_channel`,
        [B, Tq, H + H * N]: b of each head and the log decays of its channels.
      weights: the weights between the projections.
      pass_, state, record: see `Pass`.

    Returns:
      The input of out_proj [B, Tq, H * P] float32, the record and the state.
    """
    pending, old = pass_.pending, record
    lead, heads = qkvz.shape[:2], (c.value_heads, c.value_dim)
    qkvz, gates = pass_.nodes_only(qkvz), pass_.nodes_only(gates)
    qkv, z = jnp.split(qkvz, [c.d_qkv], axis=-1)
    with jax.named_scope("steps"):
        b, a = jnp.split(gates, [c.value_heads], axis=-1)
        beta = scaled(jax.nn.sigmoid(b), c.beta_max)
        if weights.dt_bias is not None and weights.A_log is not None:
            step = jax.nn.softplus(a + as_row(weights.dt_bias, 3))
            a = -jnp.exp(as_row(weights.A_log, 3)) * step
        a = a.reshape(*lead, *c.decays)

    with jax.named_scope("conv"):
        conv0 = state.conv
        if pending is not None:
            last = pending.record.qkv
            conv0 = commit_window(conv0, last, pending.path, pending.length)
        qkv = rounded_to(qkv, conv0.dtype)
        inputs = pass_.merged(None if old is None else old.qkv, qkv)
        window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
        convolved = tree_conv(inputs, weights.conv_weight, None, conv0, window)
        convolved = rounded_to(jax.nn.silu(convolved), conv0.dtype)
        q, k, v = jnp.split(convolved, [c.d_key, 2 * c.d_key], axis=-1)
        q, k = (x.reshape(*lead, c.key_heads, c.key_dim) for x in (q, k))

    with jax.named_scope("delta"):
        recorded = None if old is None else (old.k, old.k_scale, old.a)
        k, k_scale, a = pass_.merged(recorded, (k, normalizing(k), a))
        q_scale = normalizing(q) * c.key_dim**-0.5
        v = v.reshape(*lead, *heads)
        tokens = DeltaInputs(q, q_scale, k, k_scale, v, a, beta)
        y, u, ssm = delta_nodes(tokens, None if old is None else old.u, state, pass_)

    with jax.named_scope("norm"):
        y = scaled_rms_norm(y, weights.norm, ScaledNorm(c.norm_eps))
        y = y * activate(z.reshape(*lead, *heads), c.gate)
    record = DeltaRecord(u, k, k_scale, a, inputs)
    return y.reshape(*lead, -1), record, DeltaState(ssm, conv0)


def normalizing(x: jax.Array) -> jax.Array:
    """Returns the factors that give x [..., N] length 1, [...] float32."""
    squares = jnp.square(x.astype(jnp.float32)).sum(axis=-1)
    return jax.lax.rsqrt(squares + L2_EPS)


def delta_nodes(
    tokens: DeltaInputs,
    u: jax.Array | None,
    state: DeltaState,
    pass_: Pass[DeltaRecord],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the delta rule on the tree's nodes, after replaying the pending path.

    Args:
      tokens: the inputs of all T nodes, and of the queried ones.
      u: [B, T, H, P] float32, of the nodes that earlier passes computed, or None.
      state: the state before the pending path.
      pass_: the forward pass.

    Returns:
      y [B, Tq, H, P] of the queried nodes, u [B, T, H, P] of all, and the state
      [B, H, P, N] after the pending path, all float32.
    """
    nodes, pending, h0 = pass_.nodes, pass_.pending, state.ssm
    if pending is not None and nodes.scan == "tree":
        return delta_replay_scan(h0, replayed(pending), tokens, nodes.mask)
    if pending is not None:  # a chain during prefill: replay the previous chunk
        h0 = delta_replay(h0, replayed(pending))
    long = tokens.q.shape[1] > CHUNK
    if nodes.scan == "step":
        return *delta_steps(tokens, h0), h0
    if nodes.scan == "chunk" or (nodes.scan == "chain" and long):
        size = CHUNK if tokens.a.ndim == 3 else CHANNEL_CHUNK
        return *delta_chunks(tokens, h0, size), h0
    return *delta_scan(tokens, h0, nodes.mask, pass_.rows, u), h0


def in_kernel(nodes: int) -> bool:
    """True if the CPU kernel computes a tree of this many nodes."""
    return cpu_kernels.level() is not None and nodes <= MAX_NODES


class Delta(Mixer[DeltaConfig]):
    """The implementation of `mixer.Mixer` for Gated DeltaNet."""

    kind = "delta"
    Config = DeltaConfig
    Module: type[nn.Module] = DeltaModule
    State = DeltaState
    Record = DeltaRecord
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

    def init_state(
        self, c: DeltaConfig, batch: int, capacity: int, dtype: Any
    ) -> DeltaState:
        ssm = (batch, c.value_heads, c.value_dim, c.key_dim)
        conv = (batch, c.d_conv - 1, c.d_qkv)
        return DeltaState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))

    def empty_record(
        self, c: DeltaConfig, batch: int, nodes: int, dtype: Any
    ) -> DeltaRecord:
        def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
            return jnp.zeros((batch, nodes, *shape), dtype)

        return DeltaRecord(
            u=zeros(c.value_heads, c.value_dim),
            k=zeros(c.key_heads, c.key_dim, dtype=dtype),
            k_scale=zeros(c.key_heads),
            a=zeros(*c.decays),
            qkv=zeros(c.d_qkv, dtype=dtype),
        )

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
