"""Multi-head latent attention (DeepSeek-AI 2024) from tree nodes to the committed
tokens and to their own ancestors, as in Kimi-Linear and Ling-3.

A token's keys and values of all heads are products of one latent vector c: for head h,
k_h = W_h c and v_h = V_h c. So the cache has only c, and a part of the key that all
heads share. A query is multiplied by W_h^T and then attends to c itself, and
the sum of latent vectors that it reads is multiplied by V_h:

    q_h . k_h = (W_h^T q_h) . c        sum_t p_t v_ht = V_h sum_t p_t c_t

This is attention with one KV head whose values are the first channels of its keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.cpu_kernels import cpu_kernel, floats, ints
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.configs.mla import MLAConfig, mla_params
from stree_jax.models.layers.mixer import MixerModule, MixerPending, leaf
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.layers.rope import angles, rotated_pairs
from stree_jax.models.mixers.kv_cache import append_rows
from stree_jax.models.weights.linear import expert_product, linear, linear_summed
from stree_jax.models.weights.parameters import stack_of
from stree_jax.pallas_kernels import rounded_to, tree_attention


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
