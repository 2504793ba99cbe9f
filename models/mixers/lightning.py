"""Lightning attention (Qin et al. 2024) over the nodes of a tree, as in MiniMax-01.

This is linear attention whose state decays at a fixed rate, the slope, which every head
of every layer has:

    S_t = exp(-slope) S_{t-1} + v_t (outer) k_t        y_t = S_t q_t

It is the scan of Mamba2 with x = v, B = k, C = q, a step size of 1 and the log decay
-slope.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.scan import MAX_NODES
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
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, Param, Table, declare
from stree_jax.models.mixers.mamba2 import CHUNK, scan_nodes
from stree_jax.models.weights.linear import linear, linear_summed
from stree_jax.pallas_kernels import Replayed, ScanInputs, replay, rounded_to


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


@struct.dataclass
class LightningState:
    """The state of lightning attention.

    Attributes:
      kv: [B, H, P, P] float32. The first P are channels of values, the last of keys.
    """

    kv: jax.Array = leaf("state", part_axis=1)

    def commit(
        self, pending: "MixerPending[LightningRecord]", start: jax.Array
    ) -> "LightningState":
        """Replays an accepted path and returns the state after it."""
        return commit_lightning(self, pending)


@struct.dataclass
class LightningRecord:
    """The record of lightning attention (see `models.layers.mixer`).

    Attributes:
      k, v: [B, T, H, P].
      a: [B, T, H] float32, the log decays.
    """

    k: jax.Array = leaf("record", part_axis=2)
    v: jax.Array = leaf("record", part_axis=2)
    a: jax.Array = leaf("record", part_axis=2)


def replayed(pending: MixerPending[LightningRecord]) -> Replayed:
    """Returns a pending path as an argument of `pallas_kernels.replay`."""
    r = pending.record
    return Replayed(r.v, jnp.ones_like(r.a), r.a, r.k, pending.path, pending.length)


@traced_once
def commit_lightning(
    state: LightningState, pending: MixerPending[LightningRecord]
) -> LightningState:
    """Replays the accepted path into the state."""
    return LightningState(replay(state.kv, replayed(pending)))


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slopes of the heads, before they are scaled for a layer."""
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def init_slopes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns the slopes of a layer in the middle of a model."""
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


class LightningModule(MixerModule):
    """Lightning attention: projection, silu, scan, norm, gate, projection."""

    config: LightningConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[LightningRecord],
        state: LightningState,
        record: LightningRecord | None,
    ) -> tuple[jax.Array, LightningRecord, LightningState]:
        """Runs the mixer on u [B, Tq, d] float32; see `Pass` for the contract."""
        c, valid_count, pending = self.config, pass_.valid_count, pass_.pending
        p = declare(self, lightning_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("in_proj"):
            into = linear(u, p["in_proj"], valid_count=valid_count)
        with jax.named_scope("scan"):
            qkv, gate = jnp.split(into, [3 * c.d_inner], axis=-1)
            qkv = rounded_to(jax.nn.silu(pass_.nodes_only(qkv)), self.dtype)
            by_head = qkv.reshape(*u.shape[:2], 3, c.num_heads, c.head_dim)
            q, k, v = (by_head[:, :, i] for i in range(3))
            # Slopes are constants of the architecture, which training must not change.
            slope = jax.lax.stop_gradient(p["slope"].astype(jnp.float32))
            a = jnp.broadcast_to(-slope[None, None], k.shape[:-1])
            r = record = pass_.merged(record, LightningRecord(k, v, a))
            skip = jnp.zeros((c.num_heads,), jnp.float32)
            inputs = ScanInputs(r.v, jnp.ones_like(r.a), r.a, r.k, q, skip)
            past = None if pending is None else replayed(pending)
            y, kv = scan_nodes(inputs, state.kv, pass_.nodes, pass_.rows, past)
        with jax.named_scope("norm"):
            norm = ScaledNorm(c.norm_eps, parts=self.parts)
            y = scaled_rms_norm(y.reshape(gate.shape), p["norm"], norm, valid_count)
            y = y * jax.nn.sigmoid(gate)
        with jax.named_scope("out_proj"):
            out = linear_summed(y, p["out_proj"], None, self.parts, valid_count)
        return out, record, LightningState(kv)


class Lightning(Mixer[LightningConfig]):
    """The implementation of `mixer.Mixer` for lightning attention."""

    kind = "lightning"
    Config = LightningConfig
    Module = LightningModule
    State = LightningState
    Record = LightningRecord
    long_chunks = False

    def check(self, c: LightningConfig, name: str) -> None:
        if c.norm_eps <= 0:
            raise ValueError(f"{name}.norm_eps: {c.norm_eps} does not fit")

    def params(self, c: LightningConfig, d_model: int) -> Table:
        return lightning_params(c, d_model)

    def part(self, c: LightningConfig, n: int) -> LightningConfig:
        return replace(c, num_heads=c.num_heads // n)

    def init_state(
        self, c: LightningConfig, batch: int, capacity: int, dtype: Any
    ) -> LightningState:
        shape = (batch, c.num_heads, c.head_dim, c.head_dim)
        return LightningState(jnp.zeros(shape, jnp.float32))

    def empty_record(
        self, c: LightningConfig, batch: int, nodes: int, dtype: Any
    ) -> LightningRecord:
        shape = (batch, nodes, c.num_heads)
        kv = jnp.zeros((*shape, c.head_dim), dtype)
        return LightningRecord(kv, kv, jnp.zeros(shape, jnp.float32))

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
