"""Attention: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import ATTENTION_BLOCK
from stree_jax.models.base.shards import Run, run_width
from stree_jax.models.configs.mixer import (
    FLOAT,
    Arrays,
    Mixer,
    cache_dtype,
    check_shared,
)
from stree_jax.models.configs.params import ONES, ZEROS, Param, Table, conv_init
from stree_jax.models.configs.rope import Rope, Temperature, check_rope
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention.

    Attributes:
      num_heads, num_kv_heads, head_dim: Hq, Hk, hd.
      rope: rotary embedding. If None, positions are not encoded.
      scale: softmax scale. If None, it is head_dim ** -0.5.
      qkv_bias, out_bias: True if the projection has a bias.
      in_multiplier, key_multiplier, out_multiplier: scales of the input, of the keys
        (before the rotary embedding) and of the output.
      d_conv: taps of a depthwise convolution over q, k and v before the rotary
        embedding (native mamba2attn). If 0, there is no convolution.
      d_mlp: width of a parallel gated MLP inside the projections (native). If 0, there
        is no MLP.
      d_out: width of the output. If 0, it is that of the input.
      qk_norm_eps: epsilon of an RMSNorm of each head of q and k before the rotary
        embedding (Qwen3). If None, there is no such norm.
      qk_norm_whole: True if each of these norms is of all heads together, with a scale
        for each channel (OLMo).
      qk_norm_float32: True if the scales of these norms are float32 in every weight
        format.
      window: tokens that a token sees, itself included (sliding-window attention). If
        0, it sees all before it.
      sinks: True if every head has a score of a key without a value (gpt-oss).
      gated: True if the output is multiplied by the sigmoid of a further projection,
        channel by channel, before the last one (Qwen3-Next).
      gate_by_head: True if this projection has one channel for each head (LFM3).
      temperature: growth of the queries with their position (Ministral 3). If None,
        they do not grow.
      v_norm: True if each head of v has an RMSNorm with epsilon `qk_norm_eps` and
        without a scale (Gemma 4).
      k_is_v: True if v is the projection of k, before its norm and rotary embedding
        (Gemma 4).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0
    d_conv: int = 0
    d_mlp: int = 0
    d_out: int = 0
    qk_norm_eps: float | None = None
    qk_norm_float32: bool = False
    qk_norm_whole: bool = False
    gated: bool = False
    window: int = 0
    sinks: bool = False
    gate_by_head: bool = False
    temperature: Temperature | None = None
    v_norm: bool = False
    k_is_v: bool = False

    @property
    def d_qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def d_projected(self) -> int:
        """Rows of the projection that are those of q, k and, if it has its own, v."""
        return self.d_qkv - self.k_is_v * self.num_kv_heads * self.head_dim

    @property
    def d_gate(self) -> int:
        """Channels of the output's gate; 0 without a gate."""
        width = 1 if self.gate_by_head else self.head_dim
        return self.num_heads * width if self.gated else 0


def head_runs(c: AttentionConfig) -> tuple[Run, Run, Run]:
    """Returns the channels of q, k and v as runs of heads."""
    kv = kv_run(c.num_kv_heads, c.head_dim)
    return Run(c.num_heads * c.head_dim, c.num_heads), kv, kv


def kv_run(num_kv_heads: int, head_dim: int) -> Run:
    """Returns the channels of keys or of values as a run of heads."""
    return Run(num_kv_heads * head_dim, num_kv_heads, True)


def attention_params(c: AttentionConfig, d_model: int) -> Table:
    """Returns the parameters by name. The rows of `qkv` are those of the output's gate,
    of q, k and v, and of the MLP inside."""
    check_shared(c.num_heads, c.num_kv_heads)
    d_in = c.d_projected + c.d_gate + 2 * c.d_mlp
    d_out = c.num_heads * c.head_dim + c.d_mlp
    width, heads = c.d_out or d_model, head_runs(c)
    inside = (Run(c.d_mlp, c.d_mlp),) if c.d_mlp else ()
    gate = (Run(c.d_gate, c.num_heads),) if c.gated else ()
    into = (*gate, *heads[: 3 - c.k_is_v], *2 * inside)
    table = {
        "qkv": Param((d_in, d_model), runs=into, quantizable=True),
        "out": Param(
            (width, d_out), runs=(heads[0], *inside), axis=1, quantizable=True
        ),
    }
    if c.qkv_bias:
        table["qkv_bias"] = Param((d_in,), ZEROS, into)
    if c.out_bias:
        table["out_bias"] = Param((width,), ZEROS)
    if c.d_conv:
        table["conv_weight"] = Param((c.d_qkv, c.d_conv), conv_init(c.d_conv), heads)
        table["conv_bias"] = Param((c.d_qkv,), ZEROS, heads)
    if c.sinks:
        table["sinks"] = Param(
            (c.num_heads,), ZEROS, (Run(c.num_heads, c.num_heads),), float32=True
        )
    if c.qk_norm_eps is not None:
        for name, of in (("q_norm", heads[0]), ("k_norm", heads[1])):
            # All heads share one scale [hd], so every device has it whole.
            runs = (of,) if c.qk_norm_whole else ()
            width = run_width(runs) if runs else c.head_dim
            table[name] = Param((width,), ONES, runs, float32=c.qk_norm_float32)
    return table


class Attends(Protocol):
    """The options of the attention operation, in the config of a mixer; see
    `AttentionConfig`."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def window(self) -> int: ...


class AttentionMixer(Mixer[AttentionConfig]):
    """The implementation of `mixer.Mixer` for attention."""

    kind = "attention"
    Config = AttentionConfig
    has_state = True

    def check(self, c: AttentionConfig, name: str) -> None:
        eps = c.qk_norm_eps
        if eps is not None and not 0 < eps < np.inf:
            raise ValueError(f"{name}.qk_norm_eps: {eps} does not fit")
        if c.v_norm and (eps is None or c.qk_norm_whole):
            raise ValueError(f"{name}.v_norm: needs norms of each head of q and k")
        if c.k_is_v and (c.d_conv or c.qkv_bias):
            raise ValueError(f"{name}.k_is_v: beside a bias or a convolution")
        if c.rope is not None:
            check_rope(c.rope, f"{name}.rope")
        if (t := c.temperature) is not None and not 0 < t.length < np.inf:
            raise ValueError(f"{name}.temperature.length: {t.length} does not fit")

    def params(self, c: AttentionConfig, d_model: int) -> Table:
        return attention_params(c, d_model)

    def part(self, c: AttentionConfig, n: int) -> AttentionConfig:
        kv = max(c.num_kv_heads // n, 1)
        heads = c.num_heads // n
        return replace(c, num_heads=heads, num_kv_heads=kv, d_mlp=c.d_mlp // n)

    def conv_taps(self, c: AttentionConfig) -> int:
        return max(c.d_conv, 1)

    def state_arrays(
        self, c: AttentionConfig, batch: int, capacity: int, dtype: Any
    ) -> Arrays:
        kv = (batch, c.num_kv_heads, capacity, c.head_dim)
        arrays: Arrays = {name: (kv, cache_dtype(dtype)) for name in ("k", "v")}
        if c.d_conv:
            arrays["conv"] = ((batch, c.d_conv - 1, c.d_qkv), dtype)
        return arrays

    def record_arrays(
        self, c: AttentionConfig, batch: int, nodes: int, dtype: Any
    ) -> Arrays:
        kv = (batch, nodes, c.num_kv_heads, c.head_dim)
        arrays: Arrays = {"k": (kv, dtype), "v": (kv, dtype)}
        if c.d_conv:
            arrays["qkv"] = ((batch, nodes, c.d_qkv), dtype)
        return arrays

    def record_bytes(self, c: AttentionConfig, batch: int, nodes: int) -> int:
        return FLOAT * batch * nodes * 2 * c.num_kv_heads * c.head_dim

    def work_bytes(self, c: AttentionConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows = padded_rows(batch * nodes)
        outputs = c.d_gate + c.d_qkv + 2 * c.d_mlp
        products = rows * (outputs + c.num_heads * c.head_dim)
        return max(FLOAT * products, scores_bytes(c, batch, nodes, dtype))


def scores_bytes(c: Attends, batch: int, nodes: int, dtype: Any) -> int:
    """Returns the bytes of temporaries of the attention operation.

    The CPU kernel needs queries and outputs. Without it there are the scores
    [B, Hq, T, block] float32 of one block and their exponentials, the running sums, and
    the block's slice of the keys or values.
    """
    queries = batch * c.num_heads * nodes
    if cpu_kernels.level() is not None:
        return 2 * FLOAT * queries * c.head_dim
    scores = FLOAT * queries * max(ATTENTION_BLOCK, nodes)
    sums = FLOAT * queries * (c.head_dim + 2)
    sliced = FLOAT * batch * c.num_kv_heads * ATTENTION_BLOCK * c.head_dim
    rounded_queries = queries * c.head_dim * np.dtype(dtype).itemsize
    return 2 * scores + 2 * sums + sliced + rounded_queries


ATTENTION = AttentionMixer()
