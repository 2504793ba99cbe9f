"""Multi-head latent attention (DeepSeek-AI 2024) from tree nodes to the committed
tokens and to their own ancestors, as in Kimi-Linear and Ling-3.

A token's keys and values of all heads are products of one latent vector c: for head h,
k_h = W_h c and v_h = V_h c. So the cache has only c, and a part of the key that all
heads share. A query is multiplied by W_h^T and then attends to c itself, and
the sum of latent vectors that it reads is multiplied by V_h:

    q_h . k_h = (W_h^T q_h) . c        sum_t p_t v_ht = V_h sum_t p_t c_t

This is attention with one KV head whose values are the first channels of its keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import cpu_kernel, floats, ints
from stree_jax.models.base.shards import Run
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.layers.mixer import (
    FLOAT,
    Mixer,
    MixerModule,
    MixerPending,
    leaf,
    padded_rows,
)
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, Param, Table, declare
from stree_jax.models.layers.rope import Rope, angles, check_rope, rotated_pairs
from stree_jax.models.mixers.kv_cache import append_rows
from stree_jax.models.weights.formats import stack_of
from stree_jax.models.weights.linear import expert_product, linear, linear_summed
from stree_jax.pallas_kernels import (
    ATTENTION_BLOCK,
    as_bits,
    rounded_to,
    tree_attention,
)


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention.

    Attributes:
      num_heads: H.
      nope_dim, rope_dim: channels of a head of q and k that are never rotated, and of
        the part of the key that all heads share.
      value_dim: channels of a head of v.
      rank: R, channels of the latent vector.
      rope: rotary embedding of the shared part. It rotates pairs of neighbouring
        channels. If None, nothing is rotated.
      norm_eps: epsilon of the RMSNorm of the latent vector.
      gated: True if each head's output is multiplied by the sigmoid of a further
        projection.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    rope: Rope | None = None
    norm_eps: float = 1e-6
    gated: bool = False

    @property
    def qk_dim(self) -> int:
        """Channels of a head of q and k."""
        return self.nope_dim + self.rope_dim

    @property
    def d_cache(self) -> int:
        """D, channels of a cached token: the latent vector and the shared key."""
        return self.rank + self.rope_dim


@struct.dataclass
class MLAState:
    """The cache of latent attention. Every device has all of it.

    Attributes:
      kv: [B, 1, S, D]. Rows below the committed length are valid. 16-bit floats are
        stored as uint16 (see `as_bits`).
    """

    kv: jax.Array = leaf("cache", capacity_axis=2)

    def commit(
        self, pending: "MixerPending[MLARecord]", start: jax.Array
    ) -> "MLAState":
        """Returns the state after an accepted path; see `mixer.MixerState`."""
        return commit_latents(self, pending, start)


@struct.dataclass
class MLARecord:
    """The record of latent attention (see `models.layers.mixer`).

    Attributes:
      kv: [B, T, 1, D], the normed latent vectors, and the shared keys after the rotary
        embedding.
    """

    kv: jax.Array = leaf("record")


@traced_once
def commit_latents(
    state: MLAState, pending: MixerPending[MLARecord], start: jax.Array
) -> MLAState:
    """Returns the state after an accepted path whose first token is cache row `start`
    [B] int32."""
    return MLAState(append_rows(state.kv, pending.record.kv, pending.path, start))


def mla_params(c: MLAConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    The rows of `kv` are those of the latent vector and of the shared key. `up` has the
    rows of the keys of all heads, then those of their values.
    """
    H = c.num_heads
    q, out = Run(H * c.qk_dim, H), Run(H * c.value_dim, H)
    table: Table = {
        "q": Param((q.width, d_model), runs=(q,), quantizable=True),
        "kv": Param((c.d_cache, d_model), quantizable=True),
        "kv_norm": Param((c.rank,), ONES),
        "up": Param(
            (H * (c.nope_dim + c.value_dim), c.rank), runs=(Run(H * c.nope_dim, H), out)
        ),
        "out": Param((d_model, out.width), runs=(out,), axis=1, quantizable=True),
    }
    if c.gated:
        table["gate"] = Param((H, d_model), runs=(Run(H, H),))
    return table


def _by_expert(x: jax.Array, weight: jax.Array, *, axis: int) -> jax.Array:
    """Computes `by_head` as products with experts: each head's matrix is one."""
    *lead, H, C = x.shape
    experts = weight if axis == 2 else weight.swapaxes(1, 2)
    heads = jnp.tile(jnp.arange(H, dtype=jnp.int32), x.size // (H * C))
    return expert_product(x.reshape(-1, C), heads, experts).reshape(*lead, H, -1)


def _heads_unsupported(x: jax.Array, weight: jax.Array, *, axis: int) -> str | None:
    H, C = x.shape[2:]
    rows, heads = floats(x.size // C, C), ints(x.size // C)
    shape = (H, weight.shape[3 - axis], C)
    experts: Any = jax.ShapeDtypeStruct(shape, weight.dtype)
    return stack_of(experts).chosen_unsupported(rows, heads)


@cpu_kernel(
    _by_expert,
    outputs=lambda x, weight, *, axis: floats(*x.shape[:3], weight.shape[3 - axis]),
    unsupported=_heads_unsupported,
    shared=("weight",),
)
def by_head(x: jax.Array, weight: jax.Array, *, axis: int) -> jax.Array:
    """Multiplies every head of x by its own matrix.

    Args:
      x: [B, T, H, C] float32.
      weight: [H, ..], a matrix for each head.
      axis: the axis of `weight` that is summed over, 1 or 2; C long.

    Returns:
      [B, T, H, ..] float32.
    """
    batch, T, H, _ = x.shape
    x = x.astype(weight.dtype).reshape(batch * T, H, -1).swapaxes(0, 1)
    # Without the barrier XLA:CPU fuses the transpose into the product, which it cannot
    # compile in bfloat16.
    y = jax.lax.dot_general(
        jax.lax.optimization_barrier(x),
        weight,
        (((2,), (axis,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.swapaxes(0, 1).reshape(batch, T, H, -1)


class MLA(MixerModule):
    """Latent attention: projections, norm, rotary embedding, attention, projection."""

    config: MLAConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[MLARecord],
        state: MLAState,
        record: MLARecord | None,
    ) -> tuple[jax.Array, MLARecord, MLAState]:
        """Runs the mixer on u [B, Tq, d] float32; see `Pass` for the contract."""
        c, length, pending = self.config, pass_.length, pass_.pending
        valid_count = pass_.valid_count
        p = declare(self, mla_params(c, u.shape[-1]), self.dtype)
        if pending is not None:
            state = commit_latents(state, pending, length - pending.length)
        with jax.named_scope("qkv"):
            q = linear(u, p["q"], valid_count=valid_count)
            # Products also read masked keys, which must be finite.
            kv = pass_.nodes_only(linear(u, p["kv"], valid_count=valid_count))
            depth, mask = map(pass_.of_queries, (pass_.nodes.depth, pass_.nodes.mask))
            turns = angles(length[:, None] + depth, c.rope)
            up = jnp.split(p["up"], [c.num_heads * c.nope_dim])
            up_k, up_v = (w.reshape(c.num_heads, -1, c.rank) for w in up)
            q = _absorbed(q.reshape(*q.shape[:2], c.num_heads, -1), up_k, turns, c)
            new = _latents(kv, p["kv_norm"], turns, c)
            record = pass_.merged(record, MLARecord(rounded_to(new, self.dtype)))
        with jax.named_scope("attention"):
            cache = state.kv.view(self.dtype)
            # The keys are also the values, so that no part of the cache is copied.
            arrays = q, record.kv, record.kv, cache, cache, length, mask
            y = tree_attention(*arrays, c.qk_dim**-0.5)[..., : c.rank]
            y = by_head(y, up_v, axis=2)
            if c.gated:
                gate = linear(u, p["gate"], valid_count=valid_count)
                y = y * jax.nn.sigmoid(gate)[..., None]
            y = y.reshape(*u.shape[:2], -1)
            out = linear_summed(y, p["out"], None, self.parts, valid_count)
        return out, record, state


Turns = tuple[jax.Array, jax.Array]


def _absorbed(q: jax.Array, up_k: jax.Array, turns: Turns, c: MLAConfig) -> jax.Array:
    """Returns the queries [B, T, H, D] that attend to cached tokens, from q
    [B, T, H, qk_dim]."""
    own, shared = q[..., : c.nope_dim], q[..., c.nope_dim :]
    own = by_head(own, up_k, axis=1)
    return jnp.concatenate([own, _turned(shared, turns, c)], axis=-1)


def _latents(kv: jax.Array, scale: jax.Array, turns: Turns, c: MLAConfig) -> jax.Array:
    """Returns what the cache keeps of each token [B, T, 1, D], from the output [B, T,
    D] of the projection."""
    latent, shared = kv[..., : c.rank], kv[..., None, c.rank :]
    latent = scaled_rms_norm(latent, scale, ScaledNorm(c.norm_eps))[..., None, :]
    return jnp.concatenate([latent, _turned(shared, turns, c)], axis=-1)


def _turned(x: jax.Array, turns: Turns, c: MLAConfig) -> jax.Array:
    return x if c.rope is None else rotated_pairs(x, *turns)


class MLAMixer(Mixer[MLAConfig]):
    """The implementation of `mixer.Mixer` for latent attention."""

    kind = "mla"
    Config = MLAConfig
    Module = MLA
    State = MLAState
    Record = MLARecord

    def check(self, c: MLAConfig, name: str) -> None:
        if c.rope is not None:
            check_rope(c.rope, f"{name}.rope")
            if c.rope.dim != c.rope_dim:
                raise ValueError(f"{name}.rope.dim: {c.rope.dim} does not fit")

    def params(self, c: MLAConfig, d_model: int) -> Table:
        return mla_params(c, d_model)

    def part(self, c: MLAConfig, n: int) -> MLAConfig:
        return replace(c, num_heads=c.num_heads // n)

    def init_state(
        self, c: MLAConfig, batch: int, capacity: int, dtype: Any
    ) -> MLAState:
        return MLAState(as_bits(jnp.zeros((batch, 1, capacity, c.d_cache), dtype)))

    def empty_record(
        self, c: MLAConfig, batch: int, nodes: int, dtype: Any
    ) -> MLARecord:
        return MLARecord(jnp.zeros((batch, nodes, 1, c.d_cache), dtype))

    def record_bytes(self, c: MLAConfig, batch: int, nodes: int) -> int:
        return FLOAT * batch * nodes * c.d_cache

    def work_bytes(self, c: MLAConfig, batch: int, nodes: int, dtype: Any) -> int:
        rows, queries = padded_rows(batch * nodes), batch * nodes * c.num_heads
        products = rows * c.num_heads * (c.qk_dim + c.d_cache)
        if cpu_kernels.level() is not None:
            return FLOAT * max(products, 2 * queries * c.d_cache)
        scores = queries * max(ATTENTION_BLOCK, nodes)
        sums = queries * (c.d_cache + 2)
        sliced = batch * ATTENTION_BLOCK * c.d_cache
        return FLOAT * max(products, 2 * scores + 2 * sums + sliced + sums)


MLA_MIXER = MLAMixer()
