"""`delta.delta_scan` and `delta.delta_replay_scan` as one Pallas GPU kernel (Triton
backend).

There is one program per sequence, value head and block of the head's values. It reads
its part of the state once, in chunks along N. For each chunk it computes

    h      = exp(sum_j a_j) h0 + sum_j exp(sum_{i > j} a_i) u_j k_j^T
    scores = k . k and q . k      (over the tree's tokens)
    carry  = k . h and q . h

before it reads the next one; h is written once, in place of h0. Then it solves the
unit triangular system of `delta`,

    u_t = right_t - sum_{s < t} left_ts u_s

in rounds: round i computes the tokens that have i ancestors, from those of earlier
rounds. Powers of `left` would need fewer rounds, but lose all precision where keys
repeat (see `delta`).

Programs share no results, so the scores are computed once per block of values. For
decays by column they are computed in a loop of their own, see `triton_columns`.

See `triton_blocks` for how tokens are padded and for the precision of products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stree_jax.pallas_kernels import faults, triton_columns
from stree_jax.pallas_kernels.delta import DeltaInputs, DeltaReplayed, path_sums
from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.scan import Replayed
from stree_jax.pallas_kernels.triton_blocks import (
    Blocks,
    Launch,
    Specs,
    Tree,
    available,
    cleared,
    faults_of,
    marked,
    numbers,
    product,
    reached,
    replayer,
    weights,
)
from stree_jax.pallas_kernels.triton_limits import (
    MAX_TOKENS,
    MIN_TILE,
    MISSING,
    delta_unsupported,
)


def default_blocks(
    T: int, M: int, P: int, N: int, dtype: Any, by_column: bool = False
) -> Blocks:
    """Chooses blocks that compile for sm_90 without register spills and with pipelined
    loads."""
    crowded = dtype == jnp.float32 and T > MIN_TILE
    head = 16 if crowded and min(T, M) > 2 * MIN_TILE else 32
    num_warps = 8 if T > 2 * MIN_TILE else 4
    return Blocks(
        head=min(head, P & -P),
        state=min(16 if crowded or by_column else 32, N & -N),
        num_warps=num_warps,
        columns=triton_columns.columns_per_step(T, N, num_warps) if by_column else 1,
    )


def unsupported(
    inputs: DeltaInputs, mask: jax.Array, past: DeltaReplayed | None = None
) -> str | None:
    """Returns why the kernel does not support these shapes and dtypes. None if it does.

    Args:
      inputs, mask, past: as in `delta.delta_replay_scan`, or their shapes and dtypes.
    """
    if not available():
        return MISSING
    return delta_unsupported(inputs, mask, past)


def _kernel(
    h0: Any, past: Any, tree: Tree, h: Any, y: Any, u: Any, *, blocks: Blocks
) -> None:
    """Runs one program. The refs have no batch and head axes: h0 and h are [head, N], y
    and u are [Tq, head]."""
    dot = partial(product, precision=blocks.precision)
    inputs: DeltaInputs = tree.inputs
    T, Tq = inputs.k.shape[0], inputs.beta.shape[0]
    by_column = isinstance(inputs.a, triton_columns.Sums)
    decays: Any = inputs.a  # `Sums`, or an array
    key, query = numbers(T), numbers(Tq)
    row = key if tree.rows is None else jnp.clip(tree.rows[query], 0, T - 1)
    # Start loading the inputs that are used after the loop, so they arrive meanwhile.
    v, beta = inputs.v[query, :], inputs.beta[query]
    a: Any = None if by_column else decays[key]
    q_scale, k_scale = inputs.q_scale[query], inputs.k_scale[key]
    mask = mask_q = tree.mask[key[:, None], key[None]]
    k_scale_q = k_scale
    if tree.rows is not None:
        mask_q, k_scale_q = tree.mask[row[:, None], key[None]], inputs.k_scale[row]
    replay = None
    if past is not None:
        replay = (triton_columns.replayer if by_column else replayer)(past, dot)

    def chunk(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        kk, qk, known, carried = sums
        part = pl.ds(i * blocks.state, blocks.state)
        state = h0[:, part]
        if replay is not None:
            state = replay(state, part)
            h[:, part] = state
        q, k = inputs.q[query, part], inputs.k[key, part]
        k_q = k if tree.rows is None else inputs.k[row, part]
        if by_column:
            k_q, q = (triton_columns.decayed(z, decays, row, part) for z in (k_q, q))
        else:
            kk, qk = kk + dot(k_q, k, (1, 1)), qk + dot(q, k, (1, 1))
        return kk, qk, known + dot(k_q, state, (1, 1)), carried + dot(q, state, (1, 1))

    zero = partial(jnp.zeros, dtype=jnp.float32)
    scores, values = (query.size, key.size), (query.size, blocks.head)
    sums = zero(scores), zero(scores), zero(values), zero(values)
    sums = lax.fori_loop(0, h0.shape[1] // blocks.state, chunk, sums)
    kk, qk, known, carried = sums

    place = lax.iota(jnp.int32, key.size)
    allowed = (mask_q != 0) & (place[None] < T)
    if by_column:
        pairs = inputs, key, query, row, allowed
        kk, qk = triton_columns.scores(*pairs, blocks.columns)
        grown, weight = jnp.ones_like(k_scale_q), k_scale[None]
    else:
        grown, weight = weights(mask, mask_q, a, k_scale, T)
    known = (grown * k_scale_q)[:, None] * known
    right = beta[:, None] * (v.astype(jnp.float32) - known)
    before = allowed & (row[:, None] != place[None])
    left = (beta * k_scale_q)[:, None] * weight * kk
    fault = faults_of(jnp.where(before, left, 0.0)) | faults_of(right)  # see `faults`
    left = jnp.where(before & ~fault[:, None], left, 0.0)
    right = cleared(fault, right)
    if tree.rows is None:
        found = solved = _solved(left, right, before, dot)
    else:
        solved, found, fault = _solved_rows(tree, left, right, before, fault, dot)
    hit = reached(allowed, fault)
    u[...] = marked(hit, solved)
    weight = jnp.where(allowed, q_scale[:, None] * weight * qk, 0.0)
    mixed = marked(hit, dot(weight, found, (1, 0)))
    y[...] = (grown * q_scale)[:, None] * carried + mixed


def _solved(
    left: jax.Array,
    right: jax.Array,
    before: jax.Array,
    dot: Callable[..., jax.Array],
) -> jax.Array:
    """Solves u_t + sum_s left_ts u_s = right_t.

    Args:
      left: [T, T] float32, 0 except at ancestors.
      right: [T, head] float32.
      before: [T, S] bool, with as many true entries in a row as the token has
        ancestors among the T.
      dot: matrix product, see `product`.

    Returns:
      [T, head] float32.
    """
    count = before.sum(axis=1, dtype=jnp.int32)[:, None]
    solved = jnp.where(count == 0, right, 0.0)

    def tokens_with(i: Any, solved: jax.Array) -> jax.Array:
        return jnp.where(count <= i, right - dot(left, solved, (1, 0)), 0.0)

    return lax.fori_loop(1, count.max() + 1, tokens_with, solved)


def _solved_rows(
    tree: Tree,
    left: jax.Array,
    right: jax.Array,
    before: jax.Array,
    fault: jax.Array,
    dot: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Solves the system for the queried tokens, from the u of earlier ones.

    Args:
      tree: the refs; `rows` and `u` are not None.
      left, before: [Tq, T], as in `_solved`.
      right: [Tq, head] float32.
      fault: [Tq] bool, queried tokens that are not finite and were set to 0.
      dot: matrix product, see `product`.

    Returns:
      The u of the queried tokens [Tq, head] and of all tokens [T, head]; and which of
      all tokens were set to 0, [T] bool.
    """
    T, Tq = tree.u.shape[0], tree.rows.shape[0]
    place = lax.iota(jnp.int32, before.shape[1])
    real = lax.iota(jnp.int32, before.shape[0]) < Tq
    # Products with `ones` select and scatter rows; they are exact.
    ones = (tree.rows[numbers(Tq)][None] == place[:, None]) & real[None]  # [T, Tq]
    queried = ones.astype(jnp.int32).max(axis=1) != 0
    earlier = cleared(queried, tree.u[numbers(T), :])
    lost = faults_of(earlier)
    earlier, fault = cleared(lost, earlier), reached(ones, fault) | lost
    ones = ones.astype(jnp.bfloat16)
    right = right - dot(left, earlier, (1, 0))
    within = dot(left, ones, (1, 0))
    solved = _solved(within, right, before & queried[None], dot)
    return solved, earlier + dot(ones, solved, (1, 0)), fault


def _specs(past: Any, tree: Tree, head: int) -> tuple[Any, Tree]:
    """Returns the block specs of the inputs: the part of each that a program reads."""
    inputs: DeltaInputs = tree.inputs
    of = Specs(head, inputs.v.shape[2] // inputs.k.shape[2])
    a = inputs.a
    by_column = isinstance(a, triton_columns.Sums)
    tree_inputs = DeltaInputs(
        q=of.group(inputs.q),
        q_scale=of.group_steps(inputs.q_scale),
        k=of.group(inputs.k),
        k_scale=of.group_steps(inputs.k_scale),
        v=of.channels(inputs.v),
        a=jax.tree.map(of.path_sums, a) if by_column else of.steps(a),
        beta=of.steps(inputs.beta),
    )
    rows = None if tree.rows is None else of.shared(tree.rows)
    u = None if tree.u is None else of.channels(tree.u)
    tree_specs = Tree(tree_inputs, of.sequence(tree.mask), rows, u)
    if past is None:
        return None, tree_specs
    specs = Replayed(
        x=of.channels(past.x),
        dt=of.group_steps(past.dt),
        a=of.columns(past.a) if by_column else of.steps(past.a),
        B=of.group(past.B),
        path=of.sequence(past.path),
        length=of.sequence(past.length),
    )
    return specs, tree_specs


def _sums(mask: jax.Array, a: jax.Array) -> triton_columns.Sums:
    """Returns the sums of decays a [B, T, H, N] over paths; NaN reaches descendants
    only, see `faults`."""
    fault = faults.decay_faults(a)
    hit = faults.reached(mask != 0, fault)[:, None, :, None]
    sums = path_sums(mask, faults.cleared(fault, a))
    return triton_columns.Sums(*(jnp.where(hit, jnp.nan, z) for z in sums))


@int32_inside
def _call(
    h0: jax.Array,
    past: DeltaReplayed | None,
    tree: Tree,
    blocks: Blocks | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel and returns h, and y and u of the queried tokens. Without `past`,
    h is h0."""
    inputs: DeltaInputs = tree.inputs
    _, _, P, N = h0.shape
    T, Tq = inputs.k.shape[1], inputs.q.shape[1]
    M = 0 if past is None else past.path.shape[1]
    by_column = inputs.a.ndim == 4
    blocks = blocks or default_blocks(T, M, P, N, inputs.k.dtype, by_column)
    numbers = ("q_scale", "k_scale", "a", "beta")
    cast = {name: getattr(inputs, name).astype(jnp.float32) for name in numbers}
    if by_column:
        cast["a"] = _sums(tree.mask, inputs.a)
    tree = tree._replace(inputs=inputs._replace(**cast))
    recorded = None
    if past is not None:  # the key's factor has the place of dt, see `delta.as_scan`
        scale, a = (z.astype(jnp.float32) for z in (past.k_scale, past.a))
        recorded = Replayed(past.u, scale, a, past.k, past.path, past.length)
    specs = _specs(recorded, tree, blocks.head)
    name = "delta_scan" if past is None else "delta_replay_scan"
    launch = Launch(_kernel, name, blocks, specs, interpret)
    h, (y, u) = launch(h0, recorded, tree, Tq, 2)
    return h, y, u


def delta_replay_scan(
    h0: jax.Array,
    past: DeltaReplayed,
    inputs: DeltaInputs,
    mask: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `delta.delta_replay_scan` in one kernel launch, which overwrites h0.

    Args:
      h0, past, inputs, mask: as in `delta.delta_replay_scan`; `unsupported` must return
        None for them.
      blocks: block sizes. If None, those of `default_blocks`.
      interpret: True to run in Pallas's interpreter, on any device.

    Returns:
      y [B, T, H, P], u [B, T, H, P] and the replayed state [B, H, P, N], all float32.
    """
    T = mask.shape[-1]
    if _needs_groups(inputs):
        rows = jnp.arange(T, dtype=jnp.int32)
        h, y, u = _in_groups(h0, past, inputs, mask, rows, None, blocks, interpret)
        return y, u, h
    tree = Tree(inputs, mask.astype(jnp.int8), None)
    h, y, u = _call(h0, past, tree, blocks, interpret)
    return y, u, h


def delta_scan(
    inputs: DeltaInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    u: jax.Array | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `delta.delta_scan` in one kernel launch.

    Args:
      inputs, h0, mask, rows, u: as in `delta.delta_scan`; `unsupported` must return
        None for them.
      blocks, interpret: as in `delta_replay_scan`.

    Returns:
      y [B, Tq, H, P] and u [B, T, H, P], both float32.
    """
    T = mask.shape[-1]
    if rows is None and _needs_groups(inputs):
        rows = jnp.arange(T, dtype=jnp.int32)
    if rows is None:
        tree = Tree(inputs, mask.astype(jnp.int8), None)
        _, y, u = _call(h0, None, tree, blocks, interpret)
    else:
        _, y, u = _in_groups(h0, None, inputs, mask, rows, u, blocks, interpret)
    return y, u


def _needs_groups(inputs: DeltaInputs) -> bool:
    """True if a kernel that queries all tokens at a time would spill registers."""
    return inputs.a.ndim == 4 and inputs.k.shape[1] > 2 * MIN_TILE


def _in_groups(
    h0: jax.Array,
    past: DeltaReplayed | None,
    inputs: DeltaInputs,
    mask: jax.Array,
    rows: jax.Array,
    u: jax.Array | None,
    blocks: Blocks | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a path and a tree in one kernel launch for each group of queried tokens.
    Returns h, y of the queried tokens, and u of all tokens so far."""
    T, mask, h = mask.shape[-1], mask.astype(jnp.int8), h0
    if u is None:
        u = jnp.zeros((inputs.k.shape[0], T, *inputs.v.shape[2:]), jnp.float32)
    found = []
    count = MAX_TOKENS if T <= 2 * MIN_TILE else MIN_TILE  # more rows spill registers
    for i in range(0, len(rows), count):
        part = rows[i : i + count]
        tree = Tree(_queries(inputs, i, i + count), mask, part, u)
        h, y, solved = _call(h, past, tree, blocks, interpret)
        past, u = None, u.at[:, part].set(solved, mode="drop")
        found.append(y)
    return h, jnp.concatenate(found, axis=1), u


def _queries(inputs: DeltaInputs, start: int, end: int) -> DeltaInputs:
    """Returns the inputs with only the queried tokens start, ..., end - 1."""
    names = ("q", "q_scale", "v", "beta")
    cut = {name: getattr(inputs, name)[:, start:end] for name in names}
    return inputs._replace(**cut)
