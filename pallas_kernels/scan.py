"""The masked scan of tree verification and the replay of an accepted path.

Axes: B batch, T tokens (tree nodes), Tq queried ones among them, H SSM heads, P head
size, N state size, G groups (head h reads group h // (H / G)), M longest path.

What a token brings, in any float dtype; all is computed in float32:

    x  [B, T, H, P]   SSM input, after convolution
    dt [B, T, H]      step size, after softplus and clamp (0 makes a token a no-op)
    a  [B, T, H]      log decay, a = dt * A with A < 0
    B  [B, T, G, N]   input projection
    C  [B, Tq, G, N]  output projection
    D  [H] or [H, P]  skip weight per head or per channel, of all tokens

Products are written with the large operand on the left (`state`, weights), the form
in which XLA:CPU streams it at memory speed.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = lax.Precision.HIGHEST
FORGOTTEN = -128.0  # exp of this and below is 0 in float32


class ScanInputs(NamedTuple):
    """What a scan reads of T tokens, Tq of which are queried; shapes as above."""

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    C: jax.Array
    D: jax.Array


class Replayed(NamedTuple):
    """T tokens of which a path was accepted.

    Attributes:
      x, dt, a, B: as above.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count; 0 leaves the state alone.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    path: jax.Array
    length: jax.Array


def _grouped(z: jax.Array, groups: int) -> jax.Array:
    """[B, T, H, ...] -> [B, T, G, H/G, ...]."""
    return z.reshape(*z.shape[:2], groups, z.shape[2] // groups, *z.shape[3:])


def exact_split(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """hi + lo == a [B, T, H], with sums of hi over any of the T tokens exact.

    hi are multiples of one quantum; T of them stay below 2^24 quanta. The difference
    of two path sums then cancels without loss, however large the sums are.
    """
    a = jnp.maximum(a, FORGOTTEN)
    quantum = -FORGOTTEN * 2.0 ** (math.ceil(math.log2(a.shape[1])) - 24)
    hi = lax.stop_gradient(jnp.round(a / quantum) * quantum)
    return hi, a - hi


def _path_sum(mask: jax.Array, a: jax.Array) -> jax.Array:
    """sum over s of mask[t, s] * a[s]: [B, T, T], [B, T, H] -> [B, H, T]."""
    mask = mask.astype(jnp.float32)
    return jnp.einsum("bts,bsh->bht", mask, a, precision=_HIGHEST)


def tree_scan(
    inputs: ScanInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Outputs of a linear recurrence along every path of a tree (STree, section 3).

        Acum_t = sum_s L[t, s] a_s
        y_t = exp(Acum_t) (C_t . h0)
              + sum_s L[t, s] exp(Acum_t - Acum_s) dt_s (C_t . B_s) x_s + D x_t

    With a lower-triangular mask this is the causal (SSD) form, with T = 1 a plain
    decoding step. Any reflexive partial order is a valid mask.

    Args:
      inputs: of the T key tokens; C of the queries.
      h0: [B, H, P, N] float32, state before the tree's root.
      mask: [B, T, T] bool, `mask[b, t, s]` iff s is t or an ancestor of t.
      rows: [Tq] int32, which of the T tokens the queries are; None for all of them.

    Returns:
      y [B, Tq, H, P] float32.
    """
    x, dt, a, B, C, D = (z.astype(jnp.float32) for z in inputs)
    G = B.shape[2]
    hi, lo = (_path_sum(mask, part) for part in exact_split(a))  # [B, H, T] each
    x_q, mask_q, hi_q, lo_q = x, mask, hi, lo
    if rows is not None:
        x_q, mask_q = x[:, rows], mask[:, rows]
        hi_q, lo_q = hi[:, :, rows], lo[:, :, rows]

    # The exponent is masked before exp: off the path it can be large and positive.
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
    skip = D.reshape(1, 1, H, -1) * x_q
    return y.reshape(x_q.shape) + jnp.transpose(carried, (0, 3, 1, 2)) + skip


def step_scan(inputs: ScanInputs, h0: jax.Array) -> jax.Array:
    """`tree_scan` with a causal mask as the recurrence it stands for, step by step.

        h_t = exp(a_t) h_{t-1} + dt_t x_t (outer) B_t,    y_t = C_t . h_t + D x_t

    What a selective scan does with a short sequence; a baseline, see `unrolled`.

    Args:
      inputs, h0: as in `tree_scan`, Tq = T.

    Returns:
      y [B, T, H, P] float32.
    """
    x, dt, a, B, C, D = inputs
    heads = x.shape[2] // B.shape[2]

    def step(h: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        x, dt, a, B, C = (z.astype(jnp.float32) for z in inputs)  # of one token
        B, C = (jnp.repeat(z, heads, axis=1)[:, :, None] for z in (B, C))
        h = jnp.exp(a)[..., None, None] * h + (dt[..., None] * x)[..., None] * B
        return h, (h * C).sum(axis=-1)

    by_token = tuple(jnp.moveaxis(z, 1, 0) for z in (x, dt, a, B, C))
    _, y = lax.scan(step, h0, by_token)
    skip = D.astype(jnp.float32).reshape(1, 1, x.shape[2], -1) * x.astype(jnp.float32)
    return jnp.moveaxis(y, 0, 1) + skip


def path_weights(past: Replayed) -> tuple[jax.Array, jax.Array]:
    """exp(sum_{i > j} a_i) dt_j [B, M, H] and exp(sum_j a_j) [B, H] of a path."""
    take = jax.vmap(lambda z, p: z[p].astype(jnp.float32))
    place = jnp.arange(past.path.shape[1], dtype=jnp.int32)
    valid = (place[None] < past.length[:, None])[..., None]
    dt, a = (jnp.where(valid, take(z, past.path), 0.0) for z in (past.dt, past.a))
    after = lax.cumsum(a[:, 1:], axis=1, reverse=True)  # sum over i > j
    after = jnp.pad(after, ((0, 0), (0, 1), (0, 0)))
    return jnp.exp(after) * dt, jnp.exp(a.sum(axis=1))


def replay(h0: jax.Array, past: Replayed) -> jax.Array:
    """State after an accepted path, from the cached inputs of its tokens.

        h = exp(sum_j a_j) h0 + sum_j exp(sum_{i > j} a_i) dt_j x_j (outer) B_j

    One matmul over the path's M tokens, whatever the size of the tree.

    Args:
      h0: [B, H, P, N] float32, state before the path.
      past: the T candidate tokens and the path; of length 0 it returns h0.

    Returns:
      h [B, H, P, N] float32.
    """
    take = jax.vmap(lambda z, p: z[p].astype(jnp.float32))
    x, B = (take(z, past.path) for z in (past.x, past.B))
    weights, kept = path_weights(past)
    weighted = _grouped(weights[..., None] * x, B.shape[2])  # [B, M, G, H/G, P]
    added = jnp.einsum("bjghp,bjgn->bghpn", weighted, B, precision=_HIGHEST)
    return kept[..., None, None] * h0 + added.reshape(h0.shape)


def replay_tree_scan(
    h0: jax.Array, past: Replayed, inputs: ScanInputs, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`replay` of the last step's path, then `tree_scan` of this step's tree.

    Algorithm 1 of STree has this order so that the state is read and written once.

    Args:
      h0: [B, H, P, N] float32, state before the last step's path.
      past: the last step's tree and the accepted path in it.
      inputs, mask: this step's tree, as in `tree_scan`, Tq = T.

    Returns:
      y [B, T, H, P] and the replayed state [B, H, P, N], both float32.
    """
    h = replay(h0, past)
    return tree_scan(inputs, h, mask), h
