"""`scan.tree_scan` and `scan.replay_tree_scan` as one Pallas GPU kernel (Triton
backend).

There is one program per sequence, head and block of the head's channels. It reads its
part of the state once, in chunks along N. For each chunk it computes

    h      = exp(sum_j a_j) h0 + sum_j exp(sum_{i > j} a_i) dt_j x_j (outer) B_j
    scores = C . B        (over the tree's tokens)
    carry  = C . h

before it reads the next one; h is written once, in place of h0. The rest is small:

    y = exp(Acum_t) carry + (decay_ts dt_s scores_ts) x_s + D x_t

See `triton_blocks` for how tokens are padded and for the precision of products.

From jax 0.11 on, lowering the kernel emits a DeprecationWarning about the Triton
backend. Under jit this happens when the caller compiles, so this module cannot filter
it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.scan import Replayed, ScanInputs
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
    MIN_TILE,
    MISSING,
    scan_unsupported,
)


def default_blocks(T: int, P: int, N: int, dtype: Any) -> Blocks:
    """Chooses blocks that compile for sm_90 without register spills and with pipelined
    loads."""
    crowded = dtype == jnp.float32 and T > MIN_TILE
    return Blocks(head=min(32, P & -P), state=min(16 if crowded else 32, N & -N))


def unsupported(
    x: jax.Array, B: jax.Array, mask: jax.Array, path: jax.Array | None = None
) -> str | None:
    """Returns why the kernel does not support these shapes and dtypes. None if it does.

    Args:
      x, B, mask, path: as in `scan.replay_tree_scan`, or their shapes and dtypes.
    """
    if not available():
        return MISSING
    return scan_unsupported(x, B, mask, path)


def _kernel(h0: Any, past: Any, tree: Tree, h: Any, y: Any, *, blocks: Blocks) -> None:
    """Runs one program. The refs have no batch and head axes: h0 and h are [head, N], y
    is [Tq, head]."""
    dot = partial(product, precision=blocks.precision)
    inputs = tree.inputs
    T = inputs.dt.shape[0]
    key, query = numbers(T), numbers(inputs.C.shape[0])
    # Start loading the inputs that are used after the loop, so they arrive meanwhile.
    x, dt, a = inputs.x[key, :], inputs.dt[key], inputs.a[key]
    mask = tree.mask[key[:, None], key[None]]
    x_q, mask_q = x, mask
    if tree.rows is not None:
        row = jnp.clip(tree.rows[query], 0, T - 1)
        x_q, mask_q = inputs.x[row, :], tree.mask[row[:, None], key[None]]
    replay = None if past is None else replayer(past, dot)

    def chunk(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores, carried = sums
        part = pl.ds(i * blocks.state, blocks.state)
        state = h0[:, part]
        if replay is not None:
            state = replay(state, part)
            h[:, part] = state
        C = inputs.C[query, part]
        scores = scores + dot(C, inputs.B[key, part], (1, 1))
        return scores, carried + dot(C, state, (1, 1))

    zero = partial(jnp.zeros, dtype=jnp.float32)
    sums = zero((query.size, key.size)), zero((query.size, blocks.head))
    scores, carried = lax.fori_loop(0, h0.shape[1] // blocks.state, chunk, sums)

    grown, weight = weights(mask, mask_q, a, dt, T)
    D = inputs.D[...].astype(jnp.float32)
    skip = (D if D.ndim == 0 else D[None]) * x_q.astype(jnp.float32)
    # An ancestor's NaN in B, dt or a is already in `weight` (see `faults`).
    allowed = (mask_q != 0) & (lax.iota(jnp.int32, key.size)[None] < T)
    weight = jnp.where(allowed, weight * scores, 0.0)
    fault = faults_of(x)
    mixed = marked(reached(allowed, fault), dot(weight, cleared(fault, x), (1, 0)))
    y[...] = grown[:, None] * carried + mixed + skip


def _specs(past: Replayed | None, tree: Tree, head: int) -> tuple[Any, Tree]:
    """Returns the block specs of the inputs: the part of each that a program reads."""
    inputs: ScanInputs = tree.inputs
    of = Specs(head, inputs.x.shape[2] // inputs.B.shape[2])

    def tokens(z: Replayed | ScanInputs) -> tuple[Any, Any, Any, Any]:
        return of.channels(z.x), of.steps(z.dt), of.steps(z.a), of.group(z.B)

    D: Any
    if inputs.D.ndim == 1:
        D = pl.BlockSpec((None,), lambda b, h, p: (h,))
    else:
        D = pl.BlockSpec((None, head), lambda b, h, p: (h, p))
    rows = None if tree.rows is None else of.shared(tree.rows)
    tree_inputs = ScanInputs(*tokens(inputs), of.group(inputs.C), D)
    tree_specs = Tree(tree_inputs, of.sequence(tree.mask), rows)
    if past is None:
        return None, tree_specs
    path, length = of.sequence(past.path), of.sequence(past.length)
    return Replayed(*tokens(past), path, length), tree_specs


@int32_inside
def _call(
    h0: jax.Array,
    past: Replayed | None,
    tree: Tree,
    blocks: Blocks | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel and returns (h, y). Without `past`, h is h0."""
    inputs: ScanInputs = tree.inputs
    _, _, P, N = h0.shape
    T, Tq = inputs.dt.shape[1], inputs.C.shape[1]
    blocks = blocks or default_blocks(T, P, N, inputs.x.dtype)
    specs = _specs(past, tree, blocks.head)
    name = "tree_scan" if past is None else "replay_tree_scan"
    launch = Launch(_kernel, name, blocks, specs, interpret)
    h, (y,) = launch(h0, past, tree, Tq, 1)
    return h, y


def replay_tree_scan(
    h0: jax.Array,
    past: Replayed,
    inputs: ScanInputs,
    mask: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `scan.replay_tree_scan` in one kernel launch, which overwrites h0.

    Args:
      h0, past, inputs, mask: as in `scan.replay_tree_scan`; `unsupported` must return
        None for them.
      blocks: block sizes. If None, those of `default_blocks`.
      interpret: True to run in Pallas's interpreter, on any device.

    Returns:
      y [B, T, H, P] and the replayed state [B, H, P, N], both float32.
    """
    tree = Tree(inputs, mask.astype(jnp.int8), None)
    h, y = _call(h0, past, tree, blocks, interpret)
    return y, h


def tree_scan(
    inputs: ScanInputs,
    h0: jax.Array,
    mask: jax.Array,
    rows: jax.Array | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `scan.tree_scan` in one kernel launch.

    Args:
      inputs, h0, mask, rows: as in `scan.tree_scan`; `unsupported` must return None for
        them.
      blocks, interpret: as in `replay_tree_scan`.

    Returns:
      y [B, Tq, H, P] float32.
    """
    tree = Tree(inputs, mask.astype(jnp.int8), rows)
    return _call(h0, None, tree, blocks, interpret)[1]
