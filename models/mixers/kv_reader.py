"""Attention that reads the keys and values of another layer (Gemma 4).

The layer has queries of its own, and neither keys nor values: it attends with the KV
cache and the record of the last layer before it that has the mixer `source`. Its state
and record are empty, so that a text needs no memory in it.
"""

import jax
from flax import linen as nn
from flax import struct

from stree_jax.models.configs.kv_reader import KVReaderConfig, kv_reader_params
from stree_jax.models.layers.mixer import MixerModule, MixerPending
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.layers.rope import angles, rotated
from stree_jax.models.mixers.attention import attended
from stree_jax.models.weights.linear import linear, linear_summed


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
