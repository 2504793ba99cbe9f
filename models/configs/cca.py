"""Compressed convolutional attention: config, parameters, state arrays, memory."""

from dataclasses import dataclass, replace
from typing import Any

from stree_jax.models.base.shards import Run, run_width
from stree_jax.models.configs.attention import ATTENTION, AttentionConfig, head_runs
from stree_jax.models.configs.mixer import FLOAT, Arrays, Mixer, check_shared
from stree_jax.models.configs.params import NORMAL, ONES, ZEROS, Param, Table, conv_init
from stree_jax.models.configs.rope import Rope, check_rope
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class CCAConfig:
    """Compressed convolutional attention.

    Attributes:
      num_heads, num_kv_heads, head_dim: Hq, Hk, hd.
      rope: rotary embedding. If None, positions are not encoded.
      d_conv: taps of the convolution of each channel.
      d_head_conv: taps of the convolution of each head, which reads its output.
      window: tokens that a token sees, itself included. If 0, it sees all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    d_conv: int = 2
    d_head_conv: int = 2
    window: int = 0

    @property
    def taps(self) -> int:
        """K, taps of both convolutions together. v needs two."""
        return max(self.d_conv + self.d_head_conv - 1, 2)

    @property
    def heads(self) -> AttentionConfig:
        """Attention with the same caches and records."""
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        return AttentionConfig(
            *sizes, rope=self.rope, d_conv=self.taps, window=self.window
        )


def cca_params(c: CCAConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `head_conv_weight` has a matrix [hd, hd] for each head and tap. Axis 0 has the rows
    of all heads, and axis 1 the taps.
    """
    check_shared(c.num_heads, c.num_kv_heads)
    runs = head_runs(c.heads)
    qk, kv = runs[:2], (Run(c.num_kv_heads, c.num_kv_heads, True),)
    width, channels = c.num_heads * c.head_dim, run_width(runs[:2])
    return {
        "qkv": Param((run_width(runs), d_model), runs=runs, quantizable=True),
        "out": Param((d_model, width), runs=runs[:1], axis=1, quantizable=True),
        "conv_weight": Param((channels, c.d_conv), conv_init(c.d_conv), qk),
        "conv_bias": Param((channels,), ZEROS, qk),
        "head_conv_weight": Param((channels, c.d_head_conv, c.head_dim), NORMAL, qk),
        "head_conv_bias": Param((channels,), ZEROS, qk),
        "k_scale": Param((c.num_kv_heads,), ONES, kv),
    }


class CCAMixer(Mixer[CCAConfig]):
    """The implementation of `mixer.Mixer` for compressed convolutional attention."""

    kind = "cca"
    Config = CCAConfig
    has_state = True

    def check(self, c: CCAConfig, name: str) -> None:
        if min(c.d_conv, c.d_head_conv) < 1 or c.num_kv_heads * c.head_dim % 2:
            raise ValueError(f"{name}: {c} does not fit")
        if c.rope is not None:
            check_rope(c.rope, f"{name}.rope")

    def params(self, c: CCAConfig, d_model: int) -> Table:
        return cca_params(c, d_model)

    def divides(self, c: CCAConfig, d_model: int, n: int) -> bool:
        # A device needs all query heads of its KV heads, whose mean is added to k.
        return super().divides(c, d_model, n) and c.num_kv_heads % n == 0

    def part(self, c: CCAConfig, n: int) -> CCAConfig:
        heads, kv = c.num_heads // n, c.num_kv_heads // n
        return replace(c, num_heads=heads, num_kv_heads=kv)

    def conv_taps(self, c: CCAConfig) -> int:
        return c.taps

    def state_arrays(
        self, c: CCAConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        return ATTENTION.state_arrays(c.heads, batch, capacity, dtype)

    def record_arrays(self, c: CCAConfig, batch: int, nodes: int, dtype: Any) -> Arrays:
        return ATTENTION.record_arrays(c.heads, batch, nodes, dtype)

    def record_bytes(self, c: CCAConfig, batch: int, nodes: int) -> int:
        inputs = FLOAT * batch * nodes * c.heads.d_qkv
        return ATTENTION.record_bytes(c.heads, batch, nodes) + inputs

    def work_bytes(self, c: CCAConfig, batch: int, nodes: int, dtype: Any) -> int:
        each = padded_rows(batch * nodes) * c.heads.d_qkv * (c.d_head_conv + 3)
        return FLOAT * each + ATTENTION.work_bytes(c.heads, batch, nodes, dtype)


CCA_MIXER = CCAMixer()
