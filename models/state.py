"""What a model carries between calls: one entry per layer, by kind; pure pytrees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import cpu_kernel, like
from stree_jax.models.config import LayerKind, MambaConfig, ModelConfig, given
from stree_jax.models.tracing import traced_once
from stree_jax.pallas_kernels import (
    ATTENTION_BLOCK,
    Replayed,
    as_bits,
    commit_window,
    replay,
)


@struct.dataclass
class MambaState:
    """ssm [B, H, P, N] float32; conv [B, K-1, C], the convolution's last inputs."""

    ssm: jax.Array
    conv: jax.Array


@struct.dataclass
class AttentionState:
    """k, v [B, Hk, S, hd]; entries below the committed length are valid. 16-bit numbers
    are kept `as_bits`, to be viewed as numbers where they are read.

    conv [B, K-1, C]: the last inputs of the convolution over q, k, v, if there is one.
    """

    k: jax.Array
    v: jax.Array
    conv: jax.Array | None = None


@struct.dataclass
class MambaRecord:
    """Of T tokens x, dt, a, B (see `pallas_kernels.scan`), float32 but for x and B, and
    the convolution's input xBC [B, T, C]."""

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


@struct.dataclass
class ParallelState:
    """Of a layer with both mixers, "parallel" or "shared"."""

    mamba: MambaState
    attention: AttentionState


@struct.dataclass
class ParallelRecord:
    """Of a layer with both mixers, "parallel" or "shared"."""

    mamba: MambaRecord
    attention: AttentionRecord


LayerState = MambaState | AttentionState | ParallelState | None  # None: of an MLP
LayerRecord = MambaRecord | AttentionRecord | ParallelRecord | None
Records = tuple[LayerRecord, ...]
Record = TypeVar("Record")


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

    records: Records
    path: jax.Array
    length: jax.Array

    def layer(self, i: int) -> "LayerPending[Any]":
        """What layer i has to replay."""
        return LayerPending(self.records[i], self.path, self.length)


@struct.dataclass
class LayerPending(Generic[Record]):
    """One layer's part of `Pending`, or one mixer's."""

    record: Record
    path: jax.Array
    length: jax.Array


def over_parts(f: Callable[[Any, int | None], Any], tree: Any) -> Any:
    """`f(leaf, axis)` of every leaf of a pytree: along which axis the parts of a model
    (`models.shards`) each have some of it, None if they all have the same.

    State and records are a part's own, and others not.
    """

    def layer(x: Any) -> Any:
        match x:
            case MambaState():
                return MambaState(f(x.ssm, 1), f(x.conv, 2))
            case AttentionState():
                conv = None if x.conv is None else f(x.conv, 2)
                return AttentionState(f(x.k, 1), f(x.v, 1), conv)
            case MambaRecord() | AttentionRecord():
                return jax.tree.map(lambda leaf: f(leaf, 2), x)
            case _:
                return f(x, None)

    kinds = MambaState | AttentionState | MambaRecord | AttentionRecord
    return jax.tree.map(layer, tree, is_leaf=lambda x: isinstance(x, kinds))


def written_over(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` [B, T, ...] in the array `old` [B, T', ...], which may have room for more.

    What stays behind the first T is on no path. Padding would write all of them anew.
    """
    if new.shape[1] >= old.shape[1]:
        return new
    return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=1)


def shortened(record: Any) -> Any:
    """A layer's record of one token. A mixer's stays as long as it is where a kernel
    writes records in place: what is behind the first one is on no path."""
    match record:
        case MambaRecord() if cpu_kernels.at_hand():
            return record
        case ParallelRecord():
            both = shortened(record.mamba), shortened(record.attention)
            return ParallelRecord(*both)
        case _:
            return jax.tree.map(lambda x: x[:, :1], record)


def init_state(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> State:
    """The state before any token, with room for `capacity` tokens of attention."""

    def mamba() -> MambaState:
        c = given(config.mamba)
        ssm = (batch, c.num_heads, c.head_dim, c.d_state)
        conv = (batch, c.d_conv - 1, c.d_xBC)
        return MambaState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))

    def attention() -> AttentionState:
        c = given(config.attention)
        shape = (batch, c.num_kv_heads, capacity, c.head_dim)
        window = (batch, c.d_conv - 1, c.d_qkv)
        return AttentionState(
            as_bits(jnp.zeros(shape, dtype)),
            as_bits(jnp.zeros(shape, dtype)),
            jnp.zeros(window, dtype) if c.d_conv else None,
        )

    def layer(kind: LayerKind) -> LayerState:
        match kind:
            case "mamba":
                return mamba()
            case "attention":
                return attention()
            case "parallel" | "shared":
                return ParallelState(mamba(), attention())
            case "mlp" | "moe":
                return None

    length = jnp.zeros((batch,), jnp.int32)
    return State(tuple(layer(kind) for kind in config.layers), length)


def empty_record(c: MambaConfig, batch: int, nodes: int, dtype: Any) -> MambaRecord:
    """Of a Mamba2 mixer, for `nodes` tokens."""

    def zeros(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.zeros((batch, nodes, *shape), dtype)

    return MambaRecord(
        x=zeros(c.num_heads, c.head_dim),
        dt=zeros(c.num_heads, dtype=jnp.float32),
        a=zeros(c.num_heads, dtype=jnp.float32),
        B=zeros(c.n_groups if c.x_heads is None else c.num_heads, c.d_state),
        xBC=zeros(c.d_xBC),
    )


def init_records(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> Records:
    """Empty records for `nodes` tokens, to be filled level by level."""

    def zeros(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.zeros((batch, nodes, *shape), dtype)

    def mamba() -> MambaRecord:
        return empty_record(given(config.mamba), batch, nodes, dtype)

    def attention() -> AttentionRecord:
        c = given(config.attention)
        kv = (c.num_kv_heads, c.head_dim)
        qkv = zeros(c.d_qkv) if c.d_conv else None
        return AttentionRecord(zeros(*kv), zeros(*kv), qkv)

    def layer(kind: LayerKind) -> LayerRecord:
        match kind:
            case "mamba":
                return mamba()
            case "attention":
                return attention()
            case "parallel" | "shared":
                return ParallelRecord(mamba(), attention())
            case "mlp" | "moe":
                return None

    return tuple(layer(kind) for kind in config.layers)


def cache_rows(state: State) -> int | None:
    """Rows of the attention caches; None without any."""
    for entry in state.layers:
        inner = entry.attention if isinstance(entry, ParallelState) else entry
        if isinstance(inner, AttentionState):
            return inner.k.shape[2]
    return None


def whole_blocks(rows: int) -> int:
    """Rows of the caches in the blocks that a CPU's attention reads, `rows` or more."""
    return -(-rows // ATTENTION_BLOCK) * ATTENTION_BLOCK


def grow(state: State, capacity: int) -> State:
    """The same state with room for at least `capacity` tokens of attention."""

    def attention(entry: AttentionState) -> AttentionState:
        more = max(capacity - entry.k.shape[2], 0)
        pad = ((0, 0), (0, 0), (0, more), (0, 0))
        return replace(entry, k=jnp.pad(entry.k, pad), v=jnp.pad(entry.v, pad))

    def layer(entry: LayerState) -> LayerState:
        match entry:
            case AttentionState():
                return attention(entry)
            case ParallelState():
                return replace(entry, attention=attention(entry.attention))
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
    zero = np.int32(0)
    for b in range(cache.shape[0]):  # one in-place slice update a row
        place = (np.int32(b), zero, start[b], zero)
        row = as_bits(chosen[b : b + 1])
        cache = jax.lax.dynamic_update_slice(cache, row, place)
    return cache


def replayed(pending: LayerPending[MambaRecord]) -> Replayed:
    """What the SSM state replays of a path."""
    r = pending.record
    return Replayed(r.x, r.dt, r.a, r.B, pending.path, pending.length)


@traced_once
def commit_mamba(state: MambaState, pending: LayerPending[MambaRecord]) -> MambaState:
    ssm, xBC = replay(state.ssm, replayed(pending)), pending.record.xBC
    return MambaState(ssm, commit_window(state.conv, xBC, pending.path, pending.length))


def _other_arrays(
    caches: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    path: jax.Array,
    start: jax.Array,
) -> bool:
    sizes = {z.dtype.itemsize for z in (*caches, *rows)}
    known = len(sizes) == 1 and path.dtype == start.dtype == jnp.int32
    return not known or 0 in (path.size, *(z.size for z in (*caches, *rows)))


@cpu_kernel(
    "stree_append",
    outputs=lambda caches, *_: like(caches),
    unsupported=_other_arrays,
    aliases={"caches": None},
)
def append_both(
    caches: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    path: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Appends rows of keys and of values; on a CPU by a kernel that copies them.

    Args:
      caches: of both, [B, Hk, S, hd].
      rows: of both, of the tree's nodes [B, T, Hk, hd].
      path, start: [B, M] and [B] int32.
    """
    (k_cache, v_cache), (k, v), place = caches, rows, (path, start)
    return append_rows(k_cache, k, *place), append_rows(v_cache, v, *place)


@traced_once
def commit_attention(
    state: AttentionState, pending: LayerPending[AttentionRecord], start: jax.Array
) -> AttentionState:
    """The path's rows written into the caches from `start` [B] on."""
    record, path, conv = pending.record, pending.path, state.conv
    if conv is not None and record.qkv is not None:
        conv = commit_window(conv, record.qkv, path, pending.length)
    k, v = append_both((state.k, state.v), (record.k, record.v), path, start)
    return AttentionState(k, v, conv)


def commit(state: State, records: Records, path: jax.Array, length: jax.Array) -> State:
    """The state after the accepted path (activation replay).

    Args:
      state: before the tree that `records` belong to.
      records: of the tree's T tokens, one entry per layer.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count; 0 leaves a row as it was.
    """

    def mamba(entry: MambaState, record: MambaRecord) -> MambaState:
        return commit_mamba(entry, LayerPending(record, path, length))

    def attention(entry: AttentionState, record: AttentionRecord) -> AttentionState:
        return commit_attention(entry, LayerPending(record, path, length), state.length)

    def layer(entry: LayerState, record: LayerRecord) -> LayerState:
        match entry, record:
            case MambaState(), MambaRecord():
                return mamba(entry, record)
            case AttentionState(), AttentionRecord():
                return attention(entry, record)
            case ParallelState(), ParallelRecord():
                first = mamba(entry.mamba, record.mamba)
                return ParallelState(
                    first, attention(entry.attention, record.attention)
                )
            case _:
                return None

    layers = tuple(map(layer, state.layers, records))
    return State(layers, state.length + length)
