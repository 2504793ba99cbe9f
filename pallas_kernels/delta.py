"""Computes, in plain JAX, the gated delta rule over a tree of draft tokens
(`delta_scan`) and the replay of an accepted path into its state (`delta_replay`).

The gated delta rule (Yang, Kautz and Hatamizadeh 2025) corrects a linear memory. A
token decays its parent's state S_p, reads what this knows about the key k, and adds
what is missing to the value v:

    u_t = beta_t (v_t - exp(a_t) S_p k_t)
    S_t = exp(a_t) S_p + u_t k_t^T,    y_t = S_t q_t

Unrolled, S_t is the committed state S_0, decayed, plus the sum over t and its
ancestors s of exp(A_t - A_s) u_s k_s^T, where A are sums of a over paths. So the u of a
tree solve a unit triangular system in which only ancestors meet, and no state is stored
per node:

    u_t + beta_t sum_{s < t} exp(A_t - A_s) (k_t . k_s) u_s
                                            = beta_t (v_t - exp(A_t) S_0 k_t)
    y_t = exp(A_t) S_0 q_t + sum_{s <= t} exp(A_t - A_s) (q_t . k_s) u_s

Here s < t means that s is an ancestor of t. The u of a node is that of its path alone.

These functions are the reference for the kernels; gradients are computed from them.

Axes: B batch, T tokens (tree nodes), Tq queried tokens (a subset), H value heads, P
size of a value head, G key heads (head h reads key head h // (H / G)), N size of a key
head, M longest path. The state is [B, H, P, N]. Inputs, in any float dtype (computation
is in float32):

    q, q_scale     [B, Tq, G, N], [B, Tq, G]   query, and the factor that normalizes it
    k, k_scale     [B, T, G, N], [B, T, G]     key, and the factor that normalizes it
    v              [B, Tq, H, P]               value
    a              [B, T, H]                   log decay of a head's state (a <= 0), or
                   [B, T, H, N]                of each column (Kimi Delta Attention)
    beta           [B, Tq, H]                  strength of the write, 0 to 2

Keys are kept apart from their factors so that records can hold them in 16 bits.
"""

from typing import Any, NamedTuple

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
from stree_jax.pallas_kernels.scan import Replayed, exact_split, replay

_HIGHEST = lax.Precision.HIGHEST
KEYS = ("k", "k_scale", "a")  # the inputs that descendants of a token read


class DeltaInputs(NamedTuple):
    """The inputs of the delta rule, with shapes as in the module's docstring.

    Outputs are computed for Tq of the T tokens, the queried ones; only k, k_scale and a
    have the axis T.
    """

    q: jax.Array
    q_scale: jax.Array
    k: jax.Array
    k_scale: jax.Array
    v: jax.Array
    a: jax.Array
    beta: jax.Array


class DeltaReplayed(NamedTuple):
    """The records of the T nodes of the last tree, and the accepted path in it.

    Attributes:
      u: [B, T, H, P] float32, the corrections that the nodes wrote.
      k, k_scale, a: as in the module's docstring.
      path: [B, M] int32, indices of the accepted nodes among the T, in order.
      length: [B] int32, number of valid entries of `path`; 0 leaves the state
        unchanged.
    """

    u: jax.Array
    k: jax.Array
    k_scale: jax.Array
    a: jax.Array
    path: jax.Array
    length: jax.Array


def _scaled(z: jax.Array, scale: jax.Array) -> jax.Array:
    return z.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


def _per_head(z: jax.Array, heads: int) -> jax.Array:
    """Repeats [B, T, G, N] to [B, T, H, N]."""
    return jnp.repeat(z, heads // z.shape[2], axis=2)


def path_sums(mask: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums the log decays over each token's path, in two parts (see `exact_split`).

    Returns:
      Each [B, H, T], or [B, H, T, N] for decays by column.
    """
    flat = a.astype(jnp.float32).reshape(*a.shape[:2], -1)
    mask = mask.astype(jnp.float32)

    def summed(part: jax.Array) -> jax.Array:
        sums = jnp.einsum("bts,bsh->bth", mask, part, precision=_HIGHEST)
        return sums.reshape(a.shape).swapaxes(1, 2)

    hi, lo = exact_split(flat)
    return summed(hi), summed(lo)


def _decays(
    mask: jax.Array, a: jax.Array, rows: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes the decay from each token to each queried one, and from the state.

    Returns:
      exp(A_t - A_s) [B, H, Tq, T], 0 unless s is t or an ancestor of t, and exp(A_t)
      [B, H, Tq]. Both have a last axis N for decays by column.
    """
    hi, lo = path_sums(mask, a)
    hi_q, lo_q = hi, lo
    if rows is not None:
        mask, hi_q, lo_q = mask[:, rows], hi[:, :, rows], lo[:, :, rows]
    allowed = mask[:, None]  # [B, 1, Tq, T]
    if a.ndim == 4:
        allowed = allowed[..., None]
    # Mask the exponent before exp: off the path it can be large and positive.
    difference = (hi_q[:, :, :, None] - hi[:, :, None]) + (
        lo_q[:, :, :, None] - lo[:, :, None]
    )
    decay = jnp.where(allowed, jnp.exp(jnp.where(allowed, difference, 0.0)), 0.0)
    return decay, jnp.exp(hi_q + lo_q)


def _scores(z: jax.Array, k: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes z_t . (k_s decayed from s to t).

    Args:
      z: [B, Tq, G, N] float32, queries or keys.
      k: [B, T, G, N] float32.
      decay: [B, H, Tq, T], or [B, H, Tq, T, N], see `_decays`.

    Returns:
      [B, H, Tq, T].
    """
    heads = decay.shape[1]
    if decay.ndim == 5:
        z, k = _per_head(z, heads), _per_head(k, heads)
        return jnp.einsum("bqhn,bthn,bhqtn->bhqt", z, k, decay, precision=_HIGHEST)
    dots = jnp.einsum("bqgn,btgn->bgqt", z, k, precision=_HIGHEST)
    Bb, G, Tq, T = dots.shape
    grouped = decay.reshape(Bb, G, heads // G, Tq, T)
    return (grouped * dots[:, :, None]).reshape(decay.shape)


def _carried(h0: jax.Array, z: jax.Array, decay: jax.Array) -> jax.Array:
    """Multiplies the committed state, decayed to each token, by z.

    Args:
      h0: [B, H, P, N] float32.
      z: [B, T, G, N] float32.
      decay: [B, H, T], or [B, H, T, N].

    Returns:
      [B, H, P, T].
    """
    Bb, H, P, N = h0.shape
    if decay.ndim == 4:
        z = _per_head(z, H).swapaxes(1, 2) * decay
        return jnp.einsum("bhpn,bhtn->bhpt", h0, z, precision=_HIGHEST)
    state = h0.reshape(Bb, z.shape[2], -1, N)
    product = jnp.einsum("bgmn,btgn->bgmt", state, z, precision=_HIGHEST)
    return product.reshape(Bb, H, P, -1) * decay[:, :, None]


def delta_scan(
    inputs: DeltaInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    u: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule along every path of a tree.

    With a lower-triangular mask this is the chunk form of the papers; with T = 1 it is
    a plain decoding step. Any reflexive partial order whose rows come after their
    ancestors is a valid mask.

    Args:
      inputs: k, k_scale and a of all T tokens, the rest of the Tq queried ones.
      h0: [B, H, P, N] float32, state before the tree's root.
      mask: [B, T, T] bool. True at [b, t, s] if s is t or an ancestor of t.
      rows: [Tq] int32, indices of the queried tokens, ancestors first; indices >= T are
        dropped. If None, all T are queried.
      u: [B, T, H, P] float32, with the u of the tokens that earlier calls queried. None
        if `rows` is None.

    Returns:
      y [B, Tq, H, P] float32, and u [B, T, H, P] float32 of all tokens so far.
    """
    if mask.shape[-1] > 1:
        inputs, u, fault = _without_faults(inputs, rows, u)
        hit = reached(mask if rows is None else mask[:, rows], fault)
        y, solved = _along_paths(inputs, h0, mask, rows, u)
        return marked(hit, y), marked(reached(mask, fault), solved)
    return _along_paths(inputs, h0, mask, rows, u)


def _without_faults(
    inputs: DeltaInputs, rows: jax.Array | None, u: jax.Array | None
) -> tuple[DeltaInputs, jax.Array | None, jax.Array]:
    """Replaces tokens with NaN or infinity by zeros, see `faults`.

    Args:
      inputs, rows, u: as in `delta_scan`. Queries are not changed, because no other
        token reads them.

    Returns:
      The inputs, u, and which tokens were replaced, [B, T] bool.
    """
    fault = faults_of(inputs.k, inputs.k_scale) | decay_faults(inputs.a)
    own = faults_of(inputs.v, inputs.beta)
    if u is not None:
        fault |= faults_of(u)
        u = cleared(fault, u)
    fault = fault | own if rows is None else fault.at[:, rows].max(own, mode="drop")
    keys = {name: cleared(fault, getattr(inputs, name)) for name in KEYS}
    values = {name: cleared(own, getattr(inputs, name)) for name in ("v", "beta")}
    return inputs._replace(**keys, **values), u, fault


def _along_paths(
    inputs: DeltaInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None,
    u: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `delta_scan` for finite keys and values."""
    k = _scaled(inputs.k, inputs.k_scale)
    q = _scaled(inputs.q, inputs.q_scale)
    v, beta = inputs.v.astype(jnp.float32), inputs.beta.astype(jnp.float32)
    T, Tq = k.shape[1], q.shape[1]
    decay, from_state = _decays(mask, inputs.a, rows)
    k_q = k if rows is None else k[:, rows]
    both = jnp.concatenate([k_q, q], axis=1)
    twice = jnp.concatenate([from_state] * 2, axis=2)
    carried = _carried(h0, both, twice)  # one read of the state
    known, carried = jnp.split(carried, [Tq], axis=3)  # [B, H, P, Tq] each

    beta = beta.swapaxes(1, 2)  # [B, H, Tq]
    right = beta[..., None] * (jnp.moveaxis(v, 1, 2) - known.swapaxes(2, 3))
    places = jnp.arange(T, dtype=jnp.int32) if rows is None else rows
    if T == 1:
        solved = right
    else:
        itself = places[:, None] == jnp.arange(T, dtype=jnp.int32)[None]
        left = beta[..., None] * _scores(k_q, k, decay)
        left = jnp.where(itself[None, None], 0.0, left)
        start = jnp.zeros((*right.shape[:2], T, right.shape[3]), jnp.float32)
        if u is not None:
            start = u.swapaxes(1, 2)
        solved = _substituted(left, right, places, start)
    y = jnp.einsum("bhqt,bhtp->bqhp", _scores(q, k, decay), solved, precision=_HIGHEST)
    return y + jnp.transpose(carried, (0, 3, 1, 2)), solved.swapaxes(1, 2)


def _substituted(
    left: jax.Array, right: jax.Array, places: jax.Array, u: jax.Array
) -> jax.Array:
    """Solves u_t + sum_s left_ts u_s = right_t row by row (forward substitution).

    Exact in float32 for any keys. The product form of the inverse is not: powers of
    `left` grow without bound and cancel where keys repeat.

    Args:
      left: [B, H, Tq, T] float32, 0 except at ancestors.
      right: [B, H, Tq, P] float32.
      places: [Tq] int32, row t of each equation.
      u: [B, H, T, P] float32, with the rows that are known.
    """

    def row(i: jax.Array, u: jax.Array) -> jax.Array:
        known = lax.dynamic_index_in_dim(left, i, axis=2, keepdims=False)
        own = lax.dynamic_index_in_dim(right, i, axis=2, keepdims=False)
        own = own - (known[..., None] * u).sum(axis=2)
        return u.at[:, :, places[i]].set(own, mode="drop")

    return lax.fori_loop(0, right.shape[2], row, u)


SOLVE_BLOCK = 16  # rows of the diagonal blocks that `_solved` inverts


def _solved(left: jax.Array, right: jax.Array) -> jax.Array:
    """Solves (I + left) x = right for strictly lower triangular systems.

    `lax.linalg.triangular_solve` is not used because two of its calls that run at the
    same time on a CPU can wait for each other for ever: each blocks threads of XLA's
    pool until other threads of this pool have solved its batch (jaxlib 0.10.2).

    Args:
      left: [n, H, T, T] float32, 0 on and above the diagonal.
      right: [n, H, T, W] float32.

    Returns:
      [n, H, T, W] float32. Gradients are those of the exact solution.
    """

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=_HIGHEST)

    def transposed(_: Any, b: jax.Array) -> jax.Array:
        # The transposed system is upper triangular; backwards it is lower triangular.
        backwards = jnp.flip(left.swapaxes(2, 3), (2, 3))
        return jnp.flip(_by_blocks(backwards, jnp.flip(b, 2)), 2)

    return lax.custom_linear_solve(
        lambda x: x + product(left, x),
        right,
        lambda _, b: _by_blocks(left, b),
        transposed,
    )


def _by_blocks(left: jax.Array, right: jax.Array) -> jax.Array:
    """Solves (I + left) x = right as `_solved`, block after block: the diagonal blocks
    are inverted by rows, and the rest are products."""
    n, H, T, _ = left.shape
    size = min(SOLVE_BLOCK, T)
    count, pad = -(-T // size), -T % size
    left = jnp.pad(left, ((0, 0), (0, 0), (0, pad), (0, pad)))
    right = jnp.pad(right, ((0, 0), (0, 0), (0, pad), (0, 0)))
    blocks = left.reshape(n, H, count, size, count, size)
    diagonal = jnp.stack([blocks[:, :, i, :, i] for i in range(count)], axis=2)
    diagonal = diagonal.reshape(n, H * count, size, size)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), diagonal.shape)
    places = jnp.arange(size, dtype=jnp.int32)
    inverse = _substituted(diagonal, identity, places, jnp.zeros_like(diagonal))
    inverse = inverse.reshape(n, H, count, size, size)
    found: list[jax.Array] = []
    for i in range(count):
        rest = right[:, :, i * size : (i + 1) * size]
        if found:
            before = left[:, :, i * size : (i + 1) * size, : i * size]
            known = jnp.concatenate(found, axis=2)
            rest = rest - jnp.matmul(before, known, precision=_HIGHEST)
        found.append(jnp.matmul(inverse[:, :, i], rest, precision=_HIGHEST))
    return jnp.concatenate(found, axis=2)[:, :, :T]


def delta_replay(h0: jax.Array, past: DeltaReplayed) -> jax.Array:
    """Computes the state after an accepted path from the records of its tokens.

        S = exp(sum_j a_j) S_0 + sum_j exp(sum_{i > j} a_i) u_j k_j^T

    This is one product over the path's M tokens. Its cost does not depend on the size
    of the tree.

    Args:
      h0: [B, H, P, N] float32, state before the path.
      past: the T nodes of the last tree and the accepted path. A path of length 0
        returns h0.

    Returns:
      [B, H, P, N] float32.
    """
    if past.a.ndim == 3:
        return replay(h0, as_scan(past))
    place = jnp.arange(past.path.shape[1], dtype=jnp.int32)
    valid = place[None] < past.length[:, None]  # [B, M]

    def taken(z: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda z, p: z[p].astype(jnp.float32))(z, past.path)
        # Rows of padding may be NaN.
        return jnp.where(valid.reshape(*valid.shape, *[1] * (z.ndim - 2)), rows, 0.0)

    u, k, scale, a = map(taken, past[:4])
    after = lax.cumsum(a[:, 1:], axis=1, reverse=True)  # sum over i > j
    after = jnp.exp(jnp.pad(after, ((0, 0), (0, 1), (0, 0), (0, 0))))
    k = _per_head(_scaled(k, scale), u.shape[2])
    added = jnp.einsum("bjhp,bjhn->bhpn", u, k * after, precision=_HIGHEST)
    return jnp.exp(a.sum(axis=1))[:, :, None] * h0 + added


def as_scan(past: DeltaReplayed) -> Replayed:
    """Returns a path, whose decays are per head, as an argument of `scan.replay`.

    The states differ only in what a token adds: u instead of dt times x, and its
    normalized key instead of B.
    """
    u, k, scale, a, path, length = past
    ones = jnp.ones(u.shape[:3], jnp.float32)
    return Replayed(u, ones, a, _scaled(k, scale), path, length)


def delta_replay_scan(
    h0: jax.Array, past: DeltaReplayed, inputs: DeltaInputs, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `delta_replay` of the last step's path, then `delta_scan` of this step's
    tree. In this order a kernel reads and writes the state once.

    Args:
      h0: [B, H, P, N] float32, state before the last step's path.
      past: the last step's tree and the accepted path in it.
      inputs, mask: this step's tree, as in `delta_scan`, with Tq = T.

    Returns:
      y [B, T, H, P], u [B, T, H, P] and the replayed state [B, H, P, N], all float32.
    """
    h = delta_replay(h0, past)
    y, u = delta_scan(inputs, h, mask)
    return y, u, h


def delta_steps(inputs: DeltaInputs, h0: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `delta_scan` for a chain of tokens as the recurrence itself, token by
    token. A baseline for benchmarks and tests.

    Args:
      inputs, h0: as in `delta_scan`, with Tq = T.

    Returns:
      y and u [B, T, H, P] float32.
    """
    H = inputs.v.shape[2]

    def step(h: jax.Array, token: DeltaInputs) -> tuple[jax.Array, tuple]:
        q, q_scale, k, k_scale, v, a, beta = (z.astype(jnp.float32) for z in token)
        q, k = q * q_scale[..., None], k * k_scale[..., None]
        q, k = (jnp.repeat(z, H // z.shape[1], axis=1)[:, :, None] for z in (q, k))
        decay = jnp.exp(a)[:, :, None] if a.ndim == 3 else jnp.exp(a)[..., None, None]
        h = decay * h
        u = beta[..., None] * (v - (h * k).sum(axis=-1))
        h = h + u[..., None] * k
        return h, ((h * q).sum(axis=-1), u)

    tokens = DeltaInputs(*(jnp.moveaxis(z, 1, 0) for z in inputs))
    _, (y, u) = lax.scan(step, h0, tokens)
    return jnp.moveaxis(y, 0, 1), jnp.moveaxis(u, 0, 1)


def delta_chunks(
    inputs: DeltaInputs, h0: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Computes `delta_scan` with a causal mask in time linear in T.

    The system of every chunk is solved before the state that enters it is known, for
    the values and for the keys that the state meets: u = U - W S^T. Only this product
    and the recurrence of the states are sequential.

    Args:
      inputs, h0: as in `delta_scan`, with Tq = T.
      chunk: tokens per chunk; T need not be a multiple of it.

    Returns:
      y and u [B, T, H, P] float32.
    """
    batch, T, H, P = inputs.v.shape
    count, pad = -(-T // chunk), -T % chunk
    inputs, _, fault = _without_faults(inputs, None, None)
    hit = lax.cummax(fault.astype(jnp.int32), axis=1) > 0

    def chunked(z: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * count, chunk, ...]
        z = jnp.pad(z, ((0, 0), (0, pad)) + ((0, 0),) * (z.ndim - 2))
        return z.reshape(batch * count, chunk, *z.shape[2:])

    q, q_scale, k, k_scale, v, a, beta = (chunked(z) for z in inputs)
    q, k = _scaled(q, q_scale), _scaled(k, k_scale)
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))
    causal = jnp.broadcast_to(causal, (batch * count, chunk, chunk))
    decay, from_state = _decays(causal, a, None)
    beta = beta.astype(jnp.float32).swapaxes(1, 2)[..., None]  # [n, H, chunk, 1]
    left = jnp.tril(beta * _scores(k, k, decay), -1)
    by_column = from_state if from_state.ndim == 4 else from_state[..., None]
    heads = _per_head(k, H).swapaxes(1, 2)  # [n, H, chunk, N]
    right = [v.astype(jnp.float32).swapaxes(1, 2), heads * by_column]
    solved = _solved(left, beta * jnp.concatenate(right, axis=-1))
    U, W = jnp.split(solved, [P], axis=-1)
    # What a chunk adds to the state: its keys, decayed to the chunk's end.
    to_end = decay[:, :, -1]  # [n, H, chunk], or with a last axis N
    to_end = to_end if to_end.ndim == 4 else to_end[..., None]
    written = heads * to_end
    q_in = _per_head(q, H).swapaxes(1, 2) * by_column
    scores = _scores(q, k, decay)
    kept = by_column[:, :, -1:]  # [n, H, 1, 1 or N]

    def step(h: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        U, W, written, q_in, scores, kept = one
        u = U - jnp.einsum("bhtn,bhpn->bhtp", W, h, precision=_HIGHEST)
        y = jnp.einsum("bhtn,bhpn->bhtp", q_in, h, precision=_HIGHEST)
        y = y + jnp.einsum("bhts,bhsp->bhtp", scores, u, precision=_HIGHEST)
        added = jnp.einsum("bhtp,bhtn->bhpn", u, written, precision=_HIGHEST)
        return kept * h + added, (y, u)

    def by_chunk(z: jax.Array) -> jax.Array:
        return z.reshape(batch, count, *z.shape[1:]).swapaxes(0, 1)

    parts = tuple(map(by_chunk, (U, W, written, q_in, scores, kept)))
    _, outs = lax.scan(step, h0, parts)  # each [count, B, H, chunk, P]

    def joined(z: jax.Array) -> jax.Array:
        z = jnp.transpose(z, (1, 0, 3, 2, 4)).reshape(batch, count * chunk, H, P)
        return z[:, :T]

    y, u = outs
    return marked(hit, joined(y)), marked(hit, joined(u))
