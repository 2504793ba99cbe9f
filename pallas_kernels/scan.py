"""Computes, in plain JAX, the SSM scan over a tree of draft tokens (`tree_scan`) and
the replay of an accepted path into the SSM state (`replay`).

These functions are the reference for the kernels: kernels must match them, and
gradients are computed from them.

Axes: B batch, T tokens (tree nodes), Tq queried tokens (a subset), H SSM heads, P head
size, N state size, G groups (head h reads group h // (H / G)), M longest path.

The inputs of the scan, in any float dtype; computation is in float32:

    x  [B, T, H, P]   SSM input, after convolution
    dt [B, T, H]      step size, after softplus and clamp (0 makes a token a no-op)
    a  [B, T, H]      log decay, a = dt * A with A < 0
    B  [B, T, G, N]   input projection
    C  [B, Tq, G, N]  output projection
    D  [H] or [H, P]  skip weight per head or per channel, the same for all tokens

Products have the large operand (`state`, weights) on the left, the form in which
XLA:CPU reads it at memory speed.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.pallas_kernels.faults import (
    cleared,
    decay_faults,
    faults_of,
    marked,
    reached,
)

_HIGHEST = lax.Precision.HIGHEST
FORGOTTEN = -128.0  # exp of this or less is 0 in float32: the state is forgotten


class ScanInputs(NamedTuple):
    """The inputs of a scan over T tokens, with shapes as in the module's docstring.

    The scan computes outputs for Tq of the tokens, the queried ones; only C has the
    axis Tq.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    C: jax.Array
    D: jax.Array


class Replayed(NamedTuple):
    """The scan inputs that were recorded for the T nodes of the last tree, and the
    accepted path in that tree.

    Attributes:
      x, dt, a, B: as in the module's docstring.
      path: [B, M] int32, indices of the accepted nodes among the T, in order.
      length: [B] int32, number of valid entries of `path`; 0 leaves the state
        unchanged.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    path: jax.Array
    length: jax.Array


def _grouped(z: jax.Array, groups: int) -> jax.Array:
    """Reshapes [B, T, H, ...] to [B, T, G, H/G, ...]."""
    return z.reshape(*z.shape[:2], groups, z.shape[2] // groups, *z.shape[3:])


def exact_split(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a [B, T, H] into hi + lo such that sums of hi over tokens are exact.

    All hi are multiples of one quantum, and a sum of T of them stays below 2^24 quanta.
    The difference of two path sums therefore cancels without loss of precision, however
    large the sums are. Values below `FORGOTTEN` are raised to it.
    """
    a = jnp.maximum(a, FORGOTTEN)
    quantum = -FORGOTTEN * 2.0 ** (math.ceil(math.log2(a.shape[1])) - 24)
    hi = lax.stop_gradient(jnp.round(a / quantum) * quantum)
    return hi, a - hi


def _path_sum(mask: jax.Array, a: jax.Array) -> jax.Array:
    """Sums a [B, T, H] over each token's ancestors and the token itself, with the mask
    [B, T, T] of a tree. Returns [B, H, T] float32."""
    mask = mask.astype(jnp.float32)
    return jnp.einsum("bts,bsh->bht", mask, a, precision=_HIGHEST)


def tree_scan(
    inputs: ScanInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Computes a linear recurrence along every path of a tree (STree, section 3).

        Acum_t = sum_s L[t, s] a_s
        y_t = exp(Acum_t) (C_t . h0)
              + sum_s L[t, s] exp(Acum_t - Acum_s) dt_s (C_t . B_s) x_s + D x_t

    With a lower-triangular mask this is the causal (SSD) form; with T = 1 it is a plain
    decoding step. Any reflexive partial order is a valid mask.

    Args:
      inputs: inputs of all T tokens; C of the Tq queried ones.
      h0: [B, H, P, N] float32, state before the tree's root.
      mask: [B, T, T] bool, L. True at [b, t, s] if s is t or an ancestor of t.
      rows: [Tq] int32, indices of the queried tokens. If None, all T are queried.

    Returns:
      y [B, Tq, H, P] float32.
    """
    x, dt, a, B, C, D = (z.astype(jnp.float32) for z in inputs)
    own_x = x if rows is None else x[:, rows]
    hit = None
    if mask.shape[-1] > 1:
        fault = faults_of(x, dt, B) | decay_faults(a)
        x, dt, a, B = (cleared(fault, z) for z in (x, dt, a, B))
        hit = reached(mask if rows is None else mask[:, rows], fault)
    G = B.shape[2]
    hi, lo = (_path_sum(mask, part) for part in exact_split(a))  # [B, H, T] each
    mask_q, hi_q, lo_q = mask, hi, lo
    if rows is not None:
        mask_q = mask[:, rows]
        hi_q, lo_q = hi[:, :, rows], lo[:, :, rows]

    # Mask the exponent before exp: off the path it can be large and positive.
    allowed = mask_q[:, None]  # [B, 1, Tq, T]
    difference = (hi_q[..., None] - hi[:, :, None]) + (lo_q[..., None] - lo[:, :, None])
    decay = jnp.where(allowed, jnp.exp(jnp.where(allowed, difference, 0.0)), 0.0)
    weight = decay * dt.swapaxes(1, 2)[:, :, None]  # [B, H, Tq, T]

    scores = jnp.einsum("btgn,bsgn->bgts", C, B, precision=_HIGHEST)
    Bb, H, Tq, T = weight.shape
    weight = weight.reshape(Bb, G, H // G, Tq, T) * scores[:, :, None]
    y = jnp.einsum("bghts,bsghp->btghp", weight, _grouped(x, G), precision=_HIGHEST)

    state = h0.reshape(Bb, G, -1, h0.shape[-1])  # [B, G, H/G * P, N]
    carried = jnp.einsum("bgmn,btgn->bgmt", state, C, precision=_HIGHEST)
    carried = carried.reshape(Bb, H, -1, Tq) * jnp.exp(hi_q + lo_q)[:, :, None]
    skip = D.reshape(1, 1, H, -1) * own_x
    y = y.reshape(own_x.shape) + jnp.transpose(carried, (0, 3, 1, 2)) + skip
    return y if hit is None else marked(hit, y)


def step_scan(inputs: ScanInputs, h0: jax.Array) -> jax.Array:
    """Computes `tree_scan` for a chain of tokens as a recurrence, token by token.

        h_t = exp(a_t) h_{t-1} + dt_t x_t (outer) B_t,    y_t = C_t . h_t + D x_t

    Selective scans of other libraries process short sequences in this way. Here it is
    only a baseline for the benchmark of unrolled trees (`speculation.unrolled`).

    Args:
      inputs, h0: as in `tree_scan`, with Tq = T.

    Returns:
      y [B, T, H, P] float32.
    """
    x, dt, a, B, C, D = inputs
    heads = x.shape[2] // B.shape[2]

    def step(h: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        x, dt, a, B, C = (z.astype(jnp.float32) for z in inputs)  # inputs of one token
        B, C = (jnp.repeat(z, heads, axis=1)[:, :, None] for z in (B, C))
        h = jnp.exp(a)[..., None, None] * h + (dt[..., None] * x)[..., None] * B
        return h, (h * C).sum(axis=-1)

    by_token = tuple(jnp.moveaxis(z, 1, 0) for z in (x, dt, a, B, C))
    _, y = lax.scan(step, h0, by_token)
    skip = D.astype(jnp.float32).reshape(1, 1, x.shape[2], -1) * x.astype(jnp.float32)
    return jnp.moveaxis(y, 0, 1) + skip


def path_weights(past: Replayed) -> tuple[jax.Array, jax.Array]:
    """Computes the weights of the tokens of a path and of the old state in the new
    state of `replay`.

    Args:
      past: the last tree's scan inputs and the accepted path.

    Returns:
      exp(sum_{i > j} a_i) dt_j [B, M, H] for the path's tokens, and exp(sum_j a_j)
      [B, H] for the old state.
    """
    take = jax.vmap(lambda z, p: z[p].astype(jnp.float32))
    place = jnp.arange(past.path.shape[1], dtype=jnp.int32)
    valid = (place[None] < past.length[:, None])[..., None]
    dt, a = (jnp.where(valid, take(z, past.path), 0.0) for z in (past.dt, past.a))
    after = lax.cumsum(a[:, 1:], axis=1, reverse=True)  # sum over i > j
    after = jnp.pad(after, ((0, 0), (0, 1), (0, 0)))
    return jnp.exp(after) * dt, jnp.exp(a.sum(axis=1))


def replay(h0: jax.Array, past: Replayed) -> jax.Array:
    """Computes the SSM state after an accepted path from the recorded inputs of its
    tokens.

        h = exp(sum_j a_j) h0 + sum_j exp(sum_{i > j} a_i) dt_j x_j (outer) B_j

    This is one matmul over the path's M tokens, whatever the size of the tree.

    Args:
      h0: [B, H, P, N] float32, state before the path.
      past: the T nodes of the last tree and the accepted path. A path of length 0
        returns h0.

    Returns:
      h [B, H, P, N] float32.
    """
    take = jax.vmap(lambda z, p: z[p].astype(jnp.float32))
    place = jnp.arange(past.path.shape[1], dtype=jnp.int32)
    valid = (place[None] < past.length[:, None])[..., None, None]
    # Entries past the path may be NaN.
    x, B = (jnp.where(valid, take(z, past.path), 0.0) for z in (past.x, past.B))
    weights, kept = path_weights(past)
    weighted = _grouped(weights[..., None] * x, B.shape[2])  # [B, M, G, H/G, P]
    added = jnp.einsum("bjghp,bjgn->bghpn", weighted, B, precision=_HIGHEST)
    return kept[..., None, None] * h0 + added.reshape(h0.shape)


def replay_tree_scan(
    h0: jax.Array, past: Replayed, inputs: ScanInputs, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes `replay` of the last step's path, then `tree_scan` of this step's tree.

    In this order, that of Algorithm 1 of STree, a kernel reads and writes the state
    once.

    Args:
      h0: [B, H, P, N] float32, state before the last step's path.
      past: the last step's tree and the accepted path in it.
      inputs, mask: this step's tree, as in `tree_scan`, with Tq = T.

    Returns:
      y [B, T, H, P] and the replayed state [B, H, P, N], both float32.
    """
    h = replay(h0, past)
    return tree_scan(inputs, h, mask), h
