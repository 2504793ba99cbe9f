"""The layers of a hybrid model as Flax Linen modules, applied as pure functions.

Every mixer has the same signature: the nodes' inputs and their topology, the layer's
committed state, and, when only some nodes are new (`rows`), the records of all nodes
so far. It returns its output, the records, and the state after `pending`.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from stree_jax.models.config import (
    Activation,
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    Rope,
)
from stree_jax.models.nodes import Nodes
from stree_jax.models.state import (
    AttentionRecord,
    AttentionState,
    MambaRecord,
    MambaState,
    commit_attention,
)
from stree_jax.pallas_kernels import (
    chunk_scan,
    commit_window,
    replay_tree_scan,
    step_scan,
    tree_attention,
    tree_conv,
    tree_scan,
)

CHUNK = 64  # tokens per chunk of a causal scan
SKINNY = 64  # rows up to which a product is bound by reading the weight
_normal = nn.initializers.normal(0.02)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x @ weight.T + bias in float32; x is rounded to the weight's dtype first.

    Args:
      x: [..., k].
      weight: [m, k], PyTorch's own layout.
      bias: [m] or None.

    Returns:
      [..., m] float32.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    if rows.shape[0] > SKINNY:
        y = _product("tk,mk->tm", rows, weight)
    else:
        y = jax.lax.platform_dependent(
            rows, weight, cpu=_skinny_cpu, default=partial(_product, "tk,mk->tm")
        )
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = left.dtype == jnp.float32  # or a GPU would round float32 to tf32
    return jnp.einsum(
        spec,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _skinny_cpu(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """rows [t, k] @ weight.T for few rows, in the form XLA:CPU streams fastest.

    The weight stands on the left, cut into blocks of rows that the cores share. Row
    counts between 4, 8 and the multiples of 16 are slower than the next of these, and
    for one 16-bit row the whole weight would be converted on every call (two are not).
    """
    (count, k), m = rows.shape, weight.shape[0]
    if count <= 4:
        padded = 2 if weight.dtype.itemsize == 2 and count == 1 else count
    else:
        padded = 8 if count <= 8 else -(-count // 16) * 16
    rows = jnp.pad(rows, ((0, padded - count), (0, 0)))
    blocks = next(n for n in (4, 2, 1) if m % n == 0)
    y = _product("bmk,kt->bmt", weight.reshape(blocks, m // blocks, k), rows.T)
    y = jax.lax.optimization_barrier(y)  # or XLA puts the weight back on the right
    return y.reshape(m, -1)[:, :count].T


def _row(v: jax.Array, ndim: int) -> jax.Array:
    """A vector as the last axis of an ndim-dimensional array, in float32."""
    return v.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def _scaled(x: jax.Array, multiplier: float) -> jax.Array:
    return x if multiplier == 1.0 else x * multiplier


def rms_norm(x: jax.Array, eps: float, groups: int = 1) -> jax.Array:
    """x / rms(x) over each of `groups` equal parts of the last axis, in float32."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    mean = jnp.mean(jnp.square(parts), axis=-1, keepdims=True)
    return (parts * jax.lax.rsqrt(mean + eps)).reshape(x.shape)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, computed in float32."""

    kind: str
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (width,), self.dtype)
        if self.kind == "rms":
            return rms_norm(x, self.eps) * _row(scale, x.ndim)
        bias = self.param("bias", nn.initializers.zeros, (width,), self.dtype)
        centred = x - x.mean(axis=-1, keepdims=True)
        return rms_norm(centred, self.eps) * _row(scale, x.ndim) + _row(bias, x.ndim)


def _merge(record: Any, new: Any, rows: jax.Array | None) -> Any:
    """The new nodes' records written over rows `rows` of the nodes so far."""
    if rows is None:
        return new
    return jax.tree.map(lambda old, n: old.at[:, rows].set(n, mode="drop"), record, new)


def _init_A_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Inverse softplus of steps drawn log-uniformly from 0.001 to 0.1 (Mamba2)."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


def gated_norm(
    y: jax.Array, z: jax.Array, scale: jax.Array | None, config: MambaConfig
) -> jax.Array:
    """The mixer's output y gated by silu(z), normed before or after, or not at all."""
    gate = jax.nn.silu(z)
    if scale is None:
        return y * gate
    y = y * gate if config.norm == "gate_first" else y
    y = rms_norm(y, config.norm_eps, config.norm_groups) * _row(scale, y.ndim)
    return y * gate if config.norm == "norm_first" else y


class Mamba2Mixer(nn.Module):
    """Mamba2's mixer over the nodes of a tree; MambaInLlama's with `x_heads`."""

    config: MambaConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        nodes: Nodes,
        state: MambaState,
        record: MambaRecord | None,
        rows: jax.Array | None,
        pending: tuple[MambaRecord, jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, MambaRecord, MambaState]:
        c, d_model = self.config, u.shape[-1]
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        d_out = c.d_inner + c.d_mlp
        taps = nn.initializers.uniform(2 / math.sqrt(c.d_conv))
        D_shape = (c.d_inner,) if c.D_per_channel else (c.num_heads,)
        in_proj = self.param("in_proj", _normal, (c.d_in_proj, d_model), self.dtype)
        conv_weight = self.param("conv_weight", taps, (c.d_xBC, c.d_conv), self.dtype)
        dt_bias = self.param("dt_bias", _init_dt_bias, (c.num_heads,), jnp.float32)
        A_log = self.param("A_log", _init_A_log, (c.num_heads,), jnp.float32)
        D = self.param("D", ones, D_shape, jnp.float32)
        out_proj = self.param("out_proj", _normal, (d_model, d_out), self.dtype)
        in_bias = conv_bias = out_bias = None
        if c.proj_in_bias:
            in_bias = self.param("in_proj_bias", zeros, (c.d_in_proj,), self.dtype)
        if c.conv_bias:
            conv_bias = self.param("conv_bias", zeros, (c.d_xBC,), self.dtype)
        if c.proj_out_bias:
            out_bias = self.param("out_proj_bias", zeros, (d_model,), self.dtype)
        norm = (
            None
            if c.norm is None
            else self.param("norm", ones, (c.d_inner,), self.dtype)
        )

        with jax.named_scope("in_proj"):
            parts = np.cumsum([c.d_mlp, c.d_mlp, c.d_inner, c.d_xBC])
            zxbcdt = linear(_scaled(u, c.in_multiplier), in_proj, in_bias)
            if c.part_multipliers != (1.0,) * 5:
                sizes = [c.d_inner, *c.widths, c.num_heads]
                scales = np.repeat(np.array(c.part_multipliers, np.float32), sizes)
                zxbcdt = zxbcdt * _row(jnp.asarray(scales), 3)
            z0, x0, z, xBC, dt = jnp.split(zxbcdt, parts, axis=-1)
            dt = jnp.clip(jax.nn.softplus(dt + _row(dt_bias, 3)), *c.dt_limit)
            a = dt * -jnp.exp(_row(A_log, 3))

        with jax.named_scope("conv"):
            conv0 = state.conv
            if pending is not None:
                conv0 = commit_window(conv0, pending[0].xBC, *pending[1:])
            xBC = xBC.astype(conv0.dtype)
            inputs = _merge(None if record is None else record.xBC, xBC, rows)
            window = nodes.taps(c.d_conv)
            window = window if rows is None else window[:, rows]
            mixed = jax.nn.silu(
                tree_conv(inputs, conv_weight, conv_bias, conv0, window)
            )
            x, B, C = self._heads(mixed.astype(conv0.dtype))

        with jax.named_scope("scan"):
            record = _merge(record, MambaRecord(x, dt, a, B, xBC), rows)
            scanned = (record.x, record.dt, record.a, record.B, C, D)
            ssm = state.ssm
            if pending is not None:
                last, path, length = pending
                y, ssm = replay_tree_scan(
                    ssm,
                    (last.x, last.dt, last.a, last.B),
                    path,
                    length,
                    *scanned,
                    nodes.mask,
                )
            elif nodes.scan == "step":
                y = step_scan(*scanned, ssm)
            elif nodes.scan == "chunk" or (
                nodes.scan == "chain" and x.shape[1] > CHUNK
            ):
                y = chunk_scan(*scanned, ssm, CHUNK)
            else:
                y = tree_scan(*scanned, ssm, nodes.mask, rows)

        with jax.named_scope("out_proj"):
            y = gated_norm(y.reshape(*z.shape), z, norm, c)
            y = jnp.concatenate([jax.nn.silu(z0) * x0, y], axis=-1) if c.d_mlp else y
            out = linear(y, out_proj, out_bias)
        return _scaled(out, c.out_multiplier), record, MambaState(ssm, conv0)

    def _heads(self, xBC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Convolved channels as x [B,T,H,P], B [B,T,G,N], C [B,T,G,N]."""
        c, lead = self.config, xBC.shape[:2]
        x, B, C = jnp.split(xBC, np.cumsum(c.widths)[:-1], axis=-1)
        x = x.reshape(*lead, -1, c.head_dim)
        B = B.reshape(*lead, -1, c.d_state)
        C = C.reshape(*lead, -1, c.d_state)
        if c.x_heads is not None:
            repeats = c.num_heads // c.x_heads
            x, B = jnp.repeat(x, repeats, axis=2), jnp.repeat(B, repeats, axis=2)
        return x, B, C


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Radians per position of each rotated pair, [dim / 2] float32."""
    powers = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    f = 1.0 / np.float32(rope.theta) ** powers
    if rope.llama3 is None:
        return f.astype(np.float32)
    factor, low, high, old = rope.llama3
    wavelength = 2 * np.pi / f
    s = (old / wavelength - low) / (high - low)
    f = np.where(
        wavelength > old / low,
        f / factor,
        np.where(wavelength < old / high, f, f * ((1 - s) / factor + s)),
    )
    return f.astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotate pairs (i, i + dim/2) of x [B, T, heads, hd] by positions [B, T]."""
    half = rope.dim // 2
    frequencies = jnp.asarray(rope_frequencies(rope)).reshape(1, 1, 1, half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin, rest], axis=-1
    )


class Attention(nn.Module):
    """Grouped-query attention of tree nodes; see `tree_attention`."""

    config: AttentionConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        nodes: Nodes,
        state: AttentionState,
        record: AttentionRecord | None,
        rows: jax.Array | None,
        pending: tuple[AttentionRecord, jax.Array, jax.Array] | None,
        length: jax.Array,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, AttentionRecord, AttentionState]:
        """As all mixers; `adapter` [B, Tq, d_qkv] is added to q, k and v."""
        c, d_model = self.config, u.shape[-1]
        zeros = nn.initializers.zeros
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        d_in, d_out = c.d_qkv + 2 * c.d_mlp, c.num_heads * c.head_dim + c.d_mlp
        qkv = self.param("qkv", _normal, (d_in, d_model), self.dtype)
        width = c.d_out or d_model
        out = self.param("out", _normal, (width, d_out), self.dtype)
        qkv_bias = out_bias = None
        if c.qkv_bias:
            qkv_bias = self.param("qkv_bias", zeros, (d_in,), self.dtype)
        if c.out_bias:
            out_bias = self.param("out_bias", zeros, (width,), self.dtype)

        if pending is not None:
            last, path, accepted = pending
            state = commit_attention(state, last, path, accepted, length - accepted)

        with jax.named_scope("qkv"):
            projected = linear(_scaled(u, c.in_multiplier), qkv, qkv_bias)
            projected, mlp = jnp.split(projected, [c.d_qkv], axis=-1)
            if adapter is not None:
                projected = projected + adapter
            inputs = None
            if c.d_conv:
                old = None if record is None else record.qkv
                projected, inputs = self._convolved(projected, nodes, state, old, rows)
            projected = projected.reshape(*u.shape[:2], -1, c.head_dim)
            q, k, v = jnp.split(projected, np.cumsum(heads)[:-1], axis=2)
            k = _scaled(k, c.key_multiplier)
            depth, mask = nodes.depth, nodes.mask
            if rows is not None:
                depth, mask = depth[:, rows], mask[:, rows]
            if c.rope is not None:
                positions = length[:, None] + depth
                q, k = (apply_rope(w, positions, c.rope) for w in (q, k))
            new = (k.astype(state.k.dtype), v.astype(state.v.dtype))
            before = None if record is None else (record.k, record.v)
            k, v = _merge(before, new, rows)
            record = AttentionRecord(k, v, inputs)

        with jax.named_scope("attention"):
            scale = c.head_dim**-0.5 if c.scale is None else c.scale
            y = tree_attention(
                q, record.k, record.v, state.k, state.v, length, mask, scale
            )
            y = y.reshape(*u.shape[:2], -1)
            if c.d_mlp:
                up, gate = jnp.split(mlp, 2, axis=-1)
                y = jnp.concatenate([y, up * jax.nn.silu(gate)], axis=-1)
            y = linear(y, out, out_bias)
            return _scaled(y, c.out_multiplier), record, state

    def _convolved(
        self,
        qkv: jax.Array,
        nodes: Nodes,
        state: AttentionState,
        record: jax.Array | None,
        rows: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """q, k, v after a convolution along each path, and all nodes' inputs to it."""
        c = self.config
        taps = nn.initializers.uniform(2 / math.sqrt(c.d_conv))
        weight = self.param("conv_weight", taps, (c.d_qkv, c.d_conv), self.dtype)
        zeros = nn.initializers.zeros
        bias = self.param("conv_bias", zeros, (c.d_qkv,), self.dtype)
        assert state.conv is not None  # init_state makes it
        inputs = _merge(record, qkv.astype(state.conv.dtype), rows)
        window = nodes.taps(c.d_conv)
        window = window if rows is None else window[:, rows]
        return tree_conv(inputs, weight, bias, state.conv, window), inputs


def activate(x: jax.Array, name: Activation) -> jax.Array:
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "gelu":
            return jax.nn.gelu(x, approximate=False)


class MLP(nn.Module):
    """An MLP as `MLPConfig` says; `gate_up` holds the rows [gate; up]."""

    config: MLPConfig
    dtype: Any

    @nn.compact
    def __call__(self, u: jax.Array, adapter: jax.Array | None = None) -> jax.Array:
        """`adapter` is added to the rows of the first product."""
        c, d_model = self.config, u.shape[-1]
        first, rows = ("gate_up", 2 * c.d_hidden) if c.gated else ("up", c.d_hidden)
        into = self.param(first, _normal, (rows, d_model), self.dtype)
        down = self.param("down", _normal, (d_model, c.d_hidden), self.dtype)
        into_bias = down_bias = None
        if c.bias:
            zeros = nn.initializers.zeros
            into_bias = self.param(f"{first}_bias", zeros, (rows,), self.dtype)
            down_bias = self.param("down_bias", zeros, (d_model,), self.dtype)
        with jax.named_scope("mlp"):
            h = linear(u, into, into_bias)
            if adapter is not None:
                h = h + adapter
            if c.gated:
                gate, up = jnp.split(h, 2, axis=-1)
                gate = _scaled(gate, c.gate_multiplier)
                h = activate(gate, c.activation) * up
            else:
                h = activate(h, c.activation)
            return _scaled(linear(h, down, down_bias), c.down_multiplier)
