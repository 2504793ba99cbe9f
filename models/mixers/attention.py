"""Attention from tree nodes to the committed tokens and to their own ancestors."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.base.shards import ALONE, Group, Run, run_width
from stree_jax.models.layers.mixer import FLOAT, Mixer, MixerModule, padded_rows
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, ZEROS, Param, Table, conv_init, declare
from stree_jax.models.layers.rope import (
    Rope,
    Temperature,
    angles,
    check_rope,
    rotated,
    temperatures,
)
from stree_jax.models.mixers.kv_cache import (
    AttentionRecord,
    AttentionState,
    commit_attention,
)
from stree_jax.models.weights.linear import linear, linear_summed, scaled
from stree_jax.pallas_kernels import (
    ATTENTION_BLOCK,
    as_bits,
    rounded_to,
    tree_attention,
    tree_conv,
)


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


def normed_heads(
    qkv: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    c: AttentionConfig,
    parts: Group = ALONE,
) -> jax.Array:
    """Applies an RMSNorm to each head of q and k, or to all heads together, and to each
    head of v if the config says so.

    Args:
      qkv: [B, T, d_qkv] float32, the channels of q, k and v.
      q_scale, k_scale: the norms' scales: [hd], the same for all heads, or of all
        channels.
      c: the config.
      parts: the devices that share the heads.

    Returns:
      [B, T, d_qkv] float32. Without a norm of v, its channels are unchanged.
    """
    assert c.qk_norm_eps is not None
    if c.qk_norm_whole:
        norm = ScaledNorm(c.qk_norm_eps, parts=parts)
        ends = np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim
        q, k, v = jnp.split(qkv, ends, axis=2)
        q, k = scaled_rms_norm(q, q_scale, norm), scaled_rms_norm(k, k_scale, norm)
        return jnp.concatenate([q, k, v], axis=2)
    norm = ScaledNorm(c.qk_norm_eps)
    heads = qkv.reshape(*qkv.shape[:2], -1, c.head_dim)
    q, k, v = jnp.split(heads, np.cumsum([c.num_heads, c.num_kv_heads]), axis=2)
    q, k = scaled_rms_norm(q, q_scale, norm), scaled_rms_norm(k, k_scale, norm)
    if c.v_norm:
        v = scaled_rms_norm(v, jnp.ones((c.head_dim,), jnp.float32), norm)
    return jnp.concatenate([q, k, v], axis=2).reshape(qkv.shape)


class Attention(MixerModule):
    """Attention: projection, convolution, norms, rotary embedding, attention,
    projection."""

    config: AttentionConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[AttentionRecord],
        state: AttentionState,
        record: AttentionRecord | None,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract.

        Args:
          adapter: [B, Tq, d_qkv], added to q, k and v. If None, nothing is added.
        """
        c, length, pending = self.config, pass_.length, pass_.pending
        p = declare(self, attention_params(c, u.shape[-1]), self.dtype)
        if pending is not None:
            state = commit_attention(state, pending, length - pending.length)

        with jax.named_scope("qkv"):
            u, valid_count = scaled(u, c.in_multiplier), pass_.valid_count
            projected = linear(u, p["qkv"], p.get("qkv_bias"), valid_count=valid_count)
            gate, qkv, mlp = jnp.split(
                projected, [c.d_gate, c.d_gate + c.d_projected], axis=-1
            )
            if c.k_is_v:
                keys = qkv[..., c.num_heads * c.head_dim :]
                qkv = jnp.concatenate([qkv, keys], axis=-1)
            if adapter is not None:
                qkv = qkv + adapter
            inputs = None
            if state.conv is not None:
                old = None if record is None else record.qkv
                inputs = pass_.merged(old, rounded_to(qkv, state.conv.dtype))
                window = pass_.of_queries(pass_.nodes.taps(c.d_conv))
                conv = (p["conv_weight"], p["conv_bias"], state.conv, window)
                qkv = tree_conv(inputs, *conv)
            if c.qk_norm_eps is not None:
                qkv = normed_heads(qkv, p["q_norm"], p["k_norm"], c, self.parts)
            depth = pass_.of_queries(pass_.nodes.depth)
            positions = length[:, None] + depth
            turns = angles(positions, c.rope)
            q, *kv = cut_heads(qkv, *turns, valid_count, config=c, dtype=self.dtype)
            if c.temperature is not None:
                q = q * temperatures(positions, c.temperature)[:, :, None, None]
            new = AttentionRecord(*kv)
            before = None if record is None else replace(record, qkv=None)
            record = replace(pass_.merged(before, new), qkv=inputs)

        with jax.named_scope("attention"):
            y = attended(q, state, record, pass_, c, self.dtype, p.get("sinks"))
            if c.gated:
                if c.gate_by_head:
                    gate = jnp.repeat(gate, c.head_dim, axis=-1)
                y = y * jax.nn.sigmoid(gate)
            if c.d_mlp:
                up, mlp_gate = jnp.split(mlp, 2, axis=-1)
                y = jnp.concatenate([y, up * jax.nn.silu(mlp_gate)], axis=-1)
            out = linear_summed(y, p["out"], p.get("out_bias"), self.parts, valid_count)
            return scaled(out, c.out_multiplier), record, state


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


def attended(
    q: jax.Array,
    state: AttentionState,
    record: AttentionRecord,
    pass_: Pass[Any],
    c: Attends,
    dtype: Any,
    sink: jax.Array | None = None,
) -> jax.Array:
    """Computes what the queried nodes read from the committed tokens and from their
    ancestors.

    Args:
      q: [B, Tq, Hq, hd] float32, after the rotary embedding.
      state: the caches of the committed tokens.
      record: keys and values of all T nodes.
      pass_: the forward pass.
      c: the mixer's config.
      dtype: dtype of the caches.
      sink: see `tree_attention`.

    Returns:
      [B, Tq, Hq * hd] float32.
    """
    scale = c.head_dim**-0.5 if c.scale is None else c.scale
    k_cache, v_cache = (z.view(dtype) for z in (state.k, state.v))
    first, mask = seen_tokens(c.window, pass_, pass_.of_queries(pass_.nodes.mask))
    arrays = (q, record.k, record.v, k_cache, v_cache, pass_.length, mask)
    y = tree_attention(*arrays, scale, first, sink)
    return y.reshape(*q.shape[:2], -1)


def seen_tokens(
    window: int, pass_: Pass[AttentionRecord], mask: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Returns what the queried nodes see through a sliding window.

    Args:
      window: tokens that a token sees, itself included; 0 for all.
      pass_: the forward pass.
      mask: [B, Tq, T] bool, the ancestors of the queried nodes.

    Returns:
      The first row of the cache [B, Tq] int32 that each node sees, or None for the
      first row; and the mask of the ancestors that it sees.
    """
    if not window:
        return None, mask
    depth, nodes = pass_.of_queries(pass_.nodes.depth), pass_.nodes.depth
    place = pass_.length[:, None] + depth
    near = depth[:, :, None] - nodes[:, None] < window
    return jnp.maximum(place - (window - 1), 0), mask & near


def _heads_shapes(
    qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    lead, width = qkv.shape[:2], config.head_dim
    k = jax.ShapeDtypeStruct((*lead, config.num_kv_heads, width), dtype)
    return floats(*lead, config.num_heads, width), k, k


def _heads_unsupported(
    qkv: jax.Array, *_: Any, config: AttentionConfig, dtype: Any
) -> bool:
    return qkv.dtype != jnp.float32 or dtype not in (jnp.float32, jnp.bfloat16)


# XLA:CPU compiles this to eight operations, and concatenates the rotated halves with
# scalar code. The kernel's results do not depend on the other tokens of the pass.
@cpu_kernel(
    "stree_heads",
    outputs=_heads_shapes,
    unsupported=_heads_unsupported,
    attributes=lambda config, dtype: {"key_multiplier": float(config.key_multiplier)},
)
def cut_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    valid_count: jax.Array | None,
    *,
    config: AttentionConfig,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Splits the projection into heads and applies the rotary embedding to q and k.

    Args:
      qkv: [B, T, (Hq + 2 Hk) hd] float32.
      cos, sin: [B, T, half] float32, cosines and sines of the angles; half may be 0.
      valid_count: as in `linear`. Keys and values of padding are 0.
      config: the config.
      dtype: dtype of k and v.

    Returns:
      q [B, T, Hq, hd] float32, and k and v [B, T, Hk, hd] in `dtype`.
    """
    if valid_count is not None:  # products also read masked keys, which must be finite
        place = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        qkv = jnp.where((place < valid_count[:, None])[..., None], qkv, 0.0)
    heads = np.cumsum([config.num_heads, config.num_kv_heads])
    whole = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(whole, heads, axis=2)
    k = scaled(k, config.key_multiplier)
    if config.rope is not None:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return q, rounded_to(k, dtype), rounded_to(v, dtype)


class AttentionMixer(Mixer[AttentionConfig]):
    """The implementation of `mixer.Mixer` for attention."""

    kind = "attention"
    Config = AttentionConfig
    Module = Attention
    State = AttentionState
    Record = AttentionRecord

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

    def init_state(
        self, c: AttentionConfig, batch: int, capacity: int, dtype: Any
    ) -> AttentionState:
        shape = (batch, c.num_kv_heads, capacity, c.head_dim)
        window = (batch, c.d_conv - 1, c.d_qkv)
        return AttentionState(
            as_bits(jnp.zeros(shape, dtype)),
            as_bits(jnp.zeros(shape, dtype)),
            jnp.zeros(window, dtype) if c.d_conv else None,
        )

    def empty_record(
        self, c: AttentionConfig, batch: int, nodes: int, dtype: Any
    ) -> AttentionRecord:
        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((batch, nodes, *shape), dtype)

        kv = (c.num_kv_heads, c.head_dim)
        qkv = zeros(c.d_qkv) if c.d_conv else None
        return AttentionRecord(zeros(*kv), zeros(*kv), qkv)

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
