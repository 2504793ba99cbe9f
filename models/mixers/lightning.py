"""Lightning attention (Qin et al. 2024) over the nodes of a tree, as in MiniMax-01.

This is linear attention whose state decays at a fixed rate, the slope, which every head
of every layer has:

    S_t = exp(-slope) S_{t-1} + v_t (outer) k_t        y_t = S_t q_t

It is the scan of Mamba2 with x = v, B = k, C = q, a step size of 1 and the log decay
-slope.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.base.tracing import traced_once
from stree_jax.models.configs.lightning import LightningConfig, lightning_params
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.mamba2 import scan_nodes
from stree_jax.models.weights.linear import linear, linear_summed
from stree_jax.pallas_kernels import Replayed, ScanInputs, replay, rounded_to


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
