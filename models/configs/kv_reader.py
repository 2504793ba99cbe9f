"""Attention with another layer's keys and values: config, parameters, memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax.models.base.shards import Run
from stree_jax.models.configs.attention import kv_run, scores_bytes
from stree_jax.models.configs.mixer import FLOAT, Mixer, check_shared
from stree_jax.models.configs.params import ONES, Param, Table
from stree_jax.models.configs.rope import Rope, check_rope
from stree_jax.models.weights.padding import padded_rows


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


def kv_reader_params(c: KVReaderConfig, d_model: int) -> Table:
    """Returns the parameters by name."""
    check_shared(c.num_heads, c.num_kv_heads)
    width = c.num_heads * c.head_dim
    heads = (Run(width, c.num_heads),)
    return {
        "q": Param((width, d_model), runs=heads, quantizable=True),
        "q_norm": Param((c.head_dim,), ONES),
        "out": Param((d_model, width), runs=heads, axis=1, quantizable=True),
    }


class KVReaderMixer(Mixer[KVReaderConfig]):
    """The implementation of `mixer.Mixer` for attention with another layer's keys and
    values."""

    kind = "kv_reader"
    Config = KVReaderConfig
    has_state = True

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

    def work_bytes(self, c: KVReaderConfig, batch: int, nodes: int, dtype: Any) -> int:
        products = 2 * padded_rows(batch * nodes) * c.num_heads * c.head_dim
        return max(FLOAT * products, scores_bytes(c, batch, nodes, dtype))


KV_READER = KVReaderMixer()
