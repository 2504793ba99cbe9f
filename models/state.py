"""What a model carries between calls: one entry per layer, by kind; pure pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.config import ModelConfig
from stree_jax.pallas_kernels import commit_window, replay


@struct.dataclass
class MambaState:
    """ssm [B, H, P, N] float32; conv [B, K-1, C], the last K-1 inputs."""

    ssm: jax.Array
    conv: jax.Array


@struct.dataclass
class AttentionState:
    """k, v [B, Hk, S, hd]; entries below the committed length are valid.

    conv [B, K-1, C]: the last inputs of the convolution over q, k, v, if there is one.
    """

    k: jax.Array
    v: jax.Array
    conv: jax.Array | None = None


@struct.dataclass
class MambaRecord:
    """The scan inputs of T tokens: x, dt, a, B (see `pallas_kernels.scan`) and the
    convolution's input xBC [B, T, C]."""

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    xBC: jax.Array


@struct.dataclass
class AttentionRecord:
    """k (rotated), v [B, T, Hk, hd] of T tokens; qkv [B, T, C], what a convolution over
    them reads, if there is one."""

    k: jax.Array
    v: jax.Array
    qkv: jax.Array | None = None


# A parallel or shared layer has both, as a tuple; an MLP has nothing. Functions below
# call themselves for the parts; that these are no tuples in turn is beyond the checker.
LayerState = MambaState | AttentionState | tuple[MambaState, AttentionState] | None
LayerRecord = MambaRecord | AttentionRecord | tuple[MambaRecord, AttentionRecord] | None


@struct.dataclass
class State:
    """Everything a model knows of the committed tokens.

    Attributes:
      layers: one entry per layer, None where a layer keeps nothing.
      length: [B] int32, committed tokens.
    """

    layers: tuple[LayerState, ...]
    length: jax.Array


@struct.dataclass
class Pending:
    """An accepted path whose replay is left to the start of the next step.

    Attributes:
      records: one entry per layer, of the tree's T tokens.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count.
    """

    records: tuple[LayerRecord, ...]
    path: jax.Array
    length: jax.Array


def init_state(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> State:
    """The state before any token, with room for `capacity` tokens of attention."""

    def layer(kind: str) -> LayerState:
        match kind:
            case "mamba":
                m = config.mamba
                assert m is not None  # ModelConfig checks it
                ssm = (batch, m.num_heads, m.head_dim, m.d_state)
                conv = (batch, m.d_conv - 1, m.d_xBC)
                return MambaState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))
            case "attention":
                c = config.attention
                assert c is not None
                shape = (batch, c.num_kv_heads, capacity, c.head_dim)
                window = (batch, c.d_conv - 1, c.d_qkv)
                return AttentionState(
                    jnp.zeros(shape, dtype),
                    jnp.zeros(shape, dtype),
                    jnp.zeros(window, dtype) if c.d_conv else None,
                )
            case "parallel" | "shared":
                # A call of itself: the checker does not know which kind it returns.
                return layer("mamba"), layer("attention")  # type: ignore[return-value]
            case _:
                return None

    length = jnp.zeros((batch,), jnp.int32)
    return State(tuple(layer(kind) for kind in config.layers), length)


def init_records(
    config: ModelConfig, batch: int, nodes: int, dtype: Any
) -> tuple[LayerRecord, ...]:
    """Empty records for `nodes` tokens, to be filled level by level."""

    def layer(kind: str) -> LayerRecord:
        def zeros(*shape: int, dtype: Any = dtype) -> jax.Array:
            return jnp.zeros((batch, nodes, *shape), dtype)

        match kind:
            case "mamba":
                m = config.mamba
                assert m is not None  # ModelConfig checks it
                groups = m.n_groups if m.x_heads is None else m.num_heads
                return MambaRecord(
                    x=zeros(m.num_heads, m.head_dim),
                    dt=zeros(m.num_heads, dtype=jnp.float32),
                    a=zeros(m.num_heads, dtype=jnp.float32),
                    B=zeros(groups, m.d_state),
                    xBC=zeros(m.d_xBC),
                )
            case "attention":
                c = config.attention
                assert c is not None
                kv = (c.num_kv_heads, c.head_dim)
                qkv = zeros(c.d_qkv) if c.d_conv else None
                return AttentionRecord(zeros(*kv), zeros(*kv), qkv)
            case "parallel" | "shared":
                # A call of itself: the checker does not know which kind it returns.
                return layer("mamba"), layer("attention")  # type: ignore[return-value]
            case _:
                return None

    return tuple(layer(kind) for kind in config.layers)


def grow(state: State, capacity: int) -> State:
    """The same state with room for at least `capacity` tokens of attention."""

    def layer(entry: LayerState) -> LayerState:
        match entry:
            case AttentionState():
                more = max(capacity - entry.k.shape[2], 0)
                pad = ((0, 0), (0, 0), (0, more), (0, 0))
                k, v = jnp.pad(entry.k, pad), jnp.pad(entry.v, pad)
                return AttentionState(k, v, entry.conv)
            case tuple():
                # Parts of a layer have no parts: two kinds, not a tree of tuples.
                return tuple(map(layer, entry))  # type: ignore
            case _:
                return entry

    return State(tuple(map(layer, state.layers)), state.length)


def append_rows(
    cache: jax.Array, rows: jax.Array, path: jax.Array, start: jax.Array
) -> jax.Array:
    """Write the path's rows [B, T, Hk, hd] into cache [B, Hk, S, hd] from `start`.

    All M rows are written; those past the path's length lie past the committed length
    and are overwritten by the next step, so S must leave M rows of room.
    """
    chosen = jax.vmap(lambda z, p: z[p])(rows, path).swapaxes(1, 2)
    for b in range(cache.shape[0]):  # one in-place slice update a row
        cache = jax.lax.dynamic_update_slice(
            cache, chosen[b : b + 1].astype(cache.dtype), (b, 0, start[b], 0)
        )
    return cache


def commit_mamba(
    state: MambaState, record: MambaRecord, path: jax.Array, length: jax.Array
) -> MambaState:
    ssm = replay(state.ssm, record.x, record.dt, record.a, record.B, path, length)
    return MambaState(ssm, commit_window(state.conv, record.xBC, path, length))


def commit_attention(
    state: AttentionState,
    record: AttentionRecord,
    path: jax.Array,
    length: jax.Array,
    start: jax.Array,
) -> AttentionState:
    conv = state.conv
    if conv is not None and record.qkv is not None:
        conv = commit_window(conv, record.qkv, path, length)
    return AttentionState(
        append_rows(state.k, record.k, path, start),
        append_rows(state.v, record.v, path, start),
        conv,
    )


def commit(
    state: State, records: tuple[LayerRecord, ...], path: jax.Array, length: jax.Array
) -> State:
    """The state after the accepted path (activation replay).

    Args:
      state: before the tree that `records` belong to.
      records: of the tree's T tokens, one entry per layer.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count; 0 leaves a row as it was.
    """

    def layer(entry: LayerState, record: LayerRecord) -> LayerState:
        match entry, record:
            case MambaState(), MambaRecord():
                return commit_mamba(entry, record, path, length)
            case AttentionState(), AttentionRecord():
                return commit_attention(entry, record, path, length, state.length)
            case tuple(), tuple():
                # Parts of a layer have no parts: two kinds, not a tree of tuples.
                return tuple(map(layer, entry, record))  # type: ignore
            case _:
                return None

    layers = tuple(map(layer, state.layers, records))
    return State(layers, state.length + length)
