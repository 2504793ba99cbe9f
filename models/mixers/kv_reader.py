"""Attention that reads the keys and values of another layer (Gemma 4).

The layer has queries of its own, and neither keys nor values: it attends with the KV
cache and the record of the last layer before it that has the mixer `source`. Its state
and record are empty, so that a text needs no memory in it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import struct

from stree_jax.models.base.shards import Run
from stree_jax.models.layers.mixer import (
    FLOAT,
    Mixer,
    MixerModule,
    MixerPending,
    padded_rows,
)
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, Param, Table, declare
from stree_jax.models.layers.rope import Rope, angles, check_rope, rotated
from stree_jax.models.mixers.attention import attended, kv_run, scores_bytes
from stree_jax.models.weights.linear import linear, linear_summed


@dataclass(frozen=True)
class KVReaderConfig:
    """Grouped-query attention with another layer's keys and values.

    Attributes:
      kv_from: name of the attention mixer whose keys and values are read.
      num_heads, num_kv_heads, head_dim: Hq, Hk, hd; the last two are those of
        `kv_from`.
      q_norm_eps: epsilon of the RMSNorm of each head of q before the rotary embedding.
      rope: rotary embedding of q. If None, q is not rotated.
      scale: softmax scale. If None, it is head_dim ** -0.5.
      window: tokens that a token sees, itself included. If 0, it sees all before it.
    """

    kv_from: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm_eps: float
    rope: Rope | None = None
    scale: float | None = None
    window: int = 0


@struct.dataclass
class KVReaderState:
    """The empty state: the tokens are in the other layer's cache."""

    def commit(
        self, pending: "MixerPending[KVReaderRecord]", start: jax.Array
    ) -> "KVReaderState":
        """Returns the state after an accepted path, which is empty, too."""
        return self


@struct.dataclass
class KVReaderRecord:
    """The empty record."""


def kv_reader_params(c: KVReaderConfig, d_model: int) -> Table:
    """Returns the parameters by name."""
    width = c.num_heads * c.head_dim
    heads = (Run(width, c.num_heads),)
    return {
        "q": Param((width, d_model), runs=heads, quantizable=True),
        "q_norm": Param((c.head_dim,), ONES),
        "out": Param((d_model, width), runs=heads, axis=1, quantizable=True),
    }


class KVReader(MixerModule):
    """The mixer: projection, norm and rotary embedding of q, attention, projection."""

    config: KVReaderConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[KVReaderRecord],
        state: KVReaderState,
        record: KVReaderRecord | None,
    ) -> tuple[jax.Array, KVReaderRecord, KVReaderState]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract."""
        c, valid_count = self.config, pass_.valid_count
        p = declare(self, kv_reader_params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("q"):
            q = pass_.nodes_only(linear(u, p["q"], valid_count=valid_count))
            q = q.reshape(*u.shape[:2], c.num_heads, c.head_dim)
            q = scaled_rms_norm(q, p["q_norm"], ScaledNorm(c.q_norm_eps))
            depth = pass_.of_queries(pass_.nodes.depth)
            q = rotated(q, *angles(pass_.length[:, None] + depth, c.rope))
        with jax.named_scope("attention"):
            state_read, record_read = pass_.source
            y = attended(q, state_read, record_read, pass_, c, self.dtype)
            out = linear_summed(y, p["out"], None, self.parts, valid_count)
        return out, KVReaderRecord(), KVReaderState()


class KVReaderMixer(Mixer[KVReaderConfig]):
    """The implementation of `mixer.Mixer` for attention with another layer's keys and
    values."""

    kind = "kv_reader"
    Config = KVReaderConfig
    Module = KVReader
    State = KVReaderState
    Record = KVReaderRecord

    def check(self, c: KVReaderConfig, name: str) -> None:
        if not 0 < c.q_norm_eps < np.inf:
            raise ValueError(f"{name}.q_norm_eps: {c.q_norm_eps} does not fit")
        if c.rope is not None:
            check_rope(c.rope, f"{name}.rope")

    def params(self, c: KVReaderConfig, d_model: int) -> Table:
        return kv_reader_params(c, d_model)

    def source(self, c: KVReaderConfig) -> str:
        return c.kv_from

    def divides(self, c: KVReaderConfig, d_model: int, n: int) -> bool:
        # The devices must have the KV heads of `kv_from` that their queries read.
        kv = kv_run(c.num_kv_heads, c.head_dim)
        return super().divides(c, d_model, n) and kv.divides(n)

    def part(self, c: KVReaderConfig, n: int) -> KVReaderConfig:
        kv = max(c.num_kv_heads // n, 1)
        return replace(c, num_heads=c.num_heads // n, num_kv_heads=kv)

    def init_state(
        self, c: KVReaderConfig, batch: int, capacity: int, dtype: Any
    ) -> KVReaderState:
        return KVReaderState()

    def empty_record(
        self, c: KVReaderConfig, batch: int, nodes: int, dtype: Any
    ) -> KVReaderRecord:
        return KVReaderRecord()

    def work_bytes(self, c: KVReaderConfig, batch: int, nodes: int, dtype: Any) -> int:
        products = 2 * padded_rows(batch * nodes) * c.num_heads * c.head_dim
        return max(FLOAT * products, scores_bytes(c, batch, nodes, dtype))


KV_READER = KVReaderMixer()
