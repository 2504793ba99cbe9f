"""`scan.replay_tree_scan` as one Mosaic GPU kernel that uses Hopper's warpgroup matmul.

One warpgroup per (sequence, head, 64 rows of P) reads its rows of the state once and
writes them once. It computes transposed outputs, so that the state can be the left
operand of the matmul in its layout in memory:

    h   = keep h0 + sum_{j < length} w_j x_j (outer) B_j     [64, N]
    W^T = decay^T * (B C^T)                                  [S, Q]
    y^T = (h C^T) * exp(Acum) + x^T W^T                      [64, Q]

with w_j = exp(sum_{i > j} a_i) dt_j on the path and decay[t, s] =
L[t, s] exp(Acum_t - Acum_s) dt_s. XLA prepares these factors and the transposes, which
are small, and adds D x when it transposes y back.

Accuracy: h is float32 throughout. The matmuls take bfloat16 operands, so a float32
operand is passed as a sum of bfloat16 parts: three parts hold all 24 bits. Two parts
hold 16 bits; they are used if x and B are bfloat16 (one part each) or if three parts
need too much shared memory. Products of two small parts are skipped when they are below
the precision of the rest. Relative to its largest value, the error of y is about 1e-6
with three parts and 1e-5 with two.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.faults import (
    cleared,
    decay_faults,
    faults_of,
    marked,
    reached,
)
from stree_jax.pallas_kernels.scan import (
    Replayed,
    ScanInputs,
    exact_split,
    path_weights,
)

pl: Any
plgpu: Any
try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # another platform's jax, or one without absl-py
    pl = plgpu = None

Array = jax.Array
Parts = list[Array]  # bfloat16 arrays whose sum is the value

_ROWS = 64  # rows of a warpgroup's matmul: rows of P per program, and key tokens S
_COLUMNS = 64  # columns of the state per block: a full 128-byte swizzle in bfloat16
_SMEM = 227 * 1024  # bytes of shared memory per block on Hopper
_DTYPES = {"float32", "bfloat16"}


def _queries(T: int) -> int:
    """Returns T rounded up to a width that a swizzle of 32, 64 or 128 bytes covers."""
    return next(Q for Q in (16, 32, 64) if T <= Q)


def _smem_bytes(x: Any, B: Any, T: int, M: int, parts: int) -> int:
    """Returns the bytes of shared memory that one program needs, see `_scratch`."""
    N, Q = B.shape[-1], _queries(T)
    of_x, of_B = (1 if z.dtype == jnp.bfloat16 else parts for z in (x, B))
    halves = N * Q * of_B + _ROWS * Q * of_x + parts * _ROWS * (N + Q)
    path = M * (_ROWS * x.dtype.itemsize + N * B.dtype.itemsize)
    return 2 * halves + path + 3 * 1024  # alignment, barriers


def _part_count(x: Any, B: Any, T: int, M: int) -> int:
    """Returns the number of parts for float32 operands; 0 if no number fits."""
    both_bfloat16 = x.dtype == B.dtype == jnp.bfloat16
    choice = (2,) if both_bfloat16 else (3, 2)
    return next((n for n in choice if _smem_bytes(x, B, T, M, n) <= _SMEM), 0)


def unsupported(x: Any, B: Any, mask: Any, path: Any) -> str | None:
    """Returns why the kernel does not support these shapes and dtypes. None if it does.

    The kernel also needs a Hopper GPU (compute capability 9.x), which is not checked
    here.
    """
    T, P, N, M = mask.shape[-1], x.shape[-1], B.shape[-1], path.shape[-1]
    if plgpu is None or not hasattr(plgpu, "kernel"):
        return f"jax {jax.__version__} without Mosaic GPU"
    if not {x.dtype.name, B.dtype.name} <= _DTYPES:
        return f"x of {x.dtype.name}, B of {B.dtype.name}: not float32 or bfloat16"
    if T > _ROWS:
        return f"{T} tokens, more than {_ROWS}"
    if P not in (64, 128):
        return f"head size {P}, not 64 or 128"
    if N not in (64, 128, 256):
        return f"state size {N}, not 64, 128 or 256"
    if _part_count(x, B, T, M) == 0:
        return f"paths of up to {M} tokens, which need too much shared memory"
    return None


# Inputs that XLA prepares


def _parts(z: Array, count: int) -> Parts:
    """Splits z into bfloat16 arrays whose sum is z, the largest first.

    A bfloat16 array is its only part; a float32 array has `count` parts. The compiler
    never removes `reduce_precision`, as it may do with a cast and its inverse.
    """
    if z.dtype == jnp.bfloat16:
        return [z]
    parts = []
    for _ in range(count):
        part = lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        z = z - part
    return parts


def _pad(z: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * z.ndim
    widths[axis] = (0, size - z.shape[axis])
    return jnp.pad(z, widths)


def _path_weights(past: Replayed) -> Array:
    """Returns [B, H, M + 1] float32: w_j of the path's tokens, followed by keep."""
    weights, kept = path_weights(past)
    return jnp.concatenate([weights, kept[:, None]], axis=1).swapaxes(1, 2)


def _path_sum(mask: Array, a: Array) -> Array:
    """Sums a [B, T, H] over each token's ancestors and the token itself, with the mask
    [B, T, T] of a tree. Returns [B, H, T] float32."""
    return jnp.where(mask[..., None], a[:, None], 0.0).sum(2).swapaxes(1, 2)


def _decays(dt: Array, a: Array, mask: Array, Q: int) -> Array:
    """Returns [B, H, S + 1, Q] float32: the rows of decay^T, then exp(Acum).

    Entries past the T tokens are 0.
    """
    hi, lo = (_path_sum(mask, part) for part in exact_split(a.astype(jnp.float32)))
    difference = (hi[:, :, None] - hi[..., None]) + (lo[:, :, None] - lo[..., None])
    allowed = mask.swapaxes(1, 2)[:, None]
    decay = jnp.where(allowed, jnp.exp(difference), 0.0)
    decay = decay * dt.astype(jnp.float32).swapaxes(1, 2)[..., None]
    growth = jnp.exp(hi + lo)[:, :, None]
    return _pad(jnp.concatenate([_pad(decay, 2, _ROWS), growth], axis=2), 3, Q)


def _token_parts(inputs: ScanInputs, Q: int, count: int) -> tuple[Parts, Parts, Parts]:
    """Returns the bfloat16 parts of x^T [B, H, P, Q], B [B, Q, G, N] and
    C^T [B, G, N, Q]."""
    x = _pad(inputs.x.transpose(0, 2, 3, 1), 3, Q)
    C = _pad(inputs.C.transpose(0, 2, 3, 1), 3, Q)
    return _parts(x, count), _parts(_pad(inputs.B, 1, Q), count), _parts(C, count)


# The kernel


def _products(
    shape: tuple[int, int], *factors: tuple[list[Any], list[Any]]
) -> list[Array]:
    """Computes left @ right for every pair of factors.

    Args:
      shape: shape of each product.
      *factors: pairs (left, right); each factor is a list of parts in shared memory.
    """

    def add(acc, left, right, k):
        count = max(len(left), len(right))
        depth = pl.ds(k * _COLUMNS, min(left[0].shape[1], _COLUMNS))
        for i, one in enumerate(left):
            for other in right[: count - i]:
                plgpu.wgmma(acc, one.at[:, depth], other.at[depth])

    def body(*accumulators):
        for acc, (left, right) in zip(accumulators, factors, strict=True):
            blocks = max(left[0].shape[1] // _COLUMNS, 1)
            pl.loop(0, blocks)(partial(add, acc, left, right))
        return [acc[...] for acc in accumulators]

    return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * len(factors))


def _store_parts(refs: list[Any], value: Array, columns: Any = slice(None)) -> None:
    """Stores a float32 value as bfloat16 parts that sum to it, one part per ref."""
    for ref in refs:
        part = value.astype(jnp.bfloat16)
        ref[:, columns] = part
        value = value - part.astype(jnp.float32)


def _load(ref: Any, interpret: Any, layout: Any = None) -> Array:
    """Loads from global memory to registers.

    Interpreters support only plain indexing.
    """
    if interpret:
        return ref[...]
    index = (None,) if jax.version.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _replay(
    states: list[Array], length: Array, weights: Any, path_x: Any, path_B: Any
) -> list[Array]:
    """Computes keep h + sum_{j < length} w_j x_j (outer) B_j.

    Args:
      states: column blocks of the state h.
      length: tokens of the path.
      weights: w_j of the path's tokens, followed by keep.
      path_x, path_B: x and B of the path's tokens.
    """
    shape = _ROWS, _COLUMNS

    def add(j, states):
        column = weights[j] * path_x[j].astype(jnp.float32)
        column = lax.broadcast_in_dim(column, shape, (0,))
        new = []
        for c, state in enumerate(states):
            row = path_B[j, pl.ds(c * _COLUMNS, _COLUMNS)].astype(jnp.float32)
            new.append(state + column * lax.broadcast_in_dim(row, shape, (1,)))
        return new

    keep = weights[weights.shape[0] - 1]
    return lax.fori_loop(0, length, add, [keep * state for state in states])


def _fetch(smem, b, group, head, rows, path, path_x, path_B, x, B, C) -> list[Any]:
    """Starts all copies to shared memory. Returns the refs that B's parts arrive in.

    Rows of B past Q stay undefined, and so do the rows of W past Q, which are not read.
    """
    T, M = path_x.shape[1], path.shape[1]
    scores, rest = smem["scores_ready"], smem["ready"]
    left_rows = pl.ds(0, B[0].shape[1])
    for z, to in zip(B, smem["left"], strict=False):
        plgpu.copy_gmem_to_smem(z.at[b, :, group], to.at[left_rows], scores)
    for z, to in zip(C, smem["C"], strict=True):
        plgpu.copy_gmem_to_smem(z.at[b, group], to, scores)
    for z, to in zip(x, smem["x"], strict=True):
        plgpu.copy_gmem_to_smem(z.at[b, head, rows], to, rest)
    tokens = [jnp.clip(path[b, j], 0, T - 1) for j in range(M)]
    for j, token in enumerate(tokens):
        source = path_x.at[b, token, head, rows], path_B.at[b, token, group]
        plgpu.copy_gmem_to_smem(source[0], smem["path_x"].at[j], rest)
        plgpu.copy_gmem_to_smem(source[1], smem["path_B"].at[j], rest)
    return smem["left"][: len(B)]


def _body(
    interpret, h0, path, length, path_x, path_B, weights, decay, x, B, C, y, h, smem
) -> None:
    b, head, p = (lax.axis_index(name) for name in ("batch", "head", "rows"))
    group = head // (h0.shape[1] // B[0].shape[2])
    rows = pl.ds(p * _ROWS, _ROWS)
    columns = [pl.ds(c, _COLUMNS) for c in range(0, h0.shape[-1], _COLUMNS)]
    shape = _ROWS, y.shape[-1]
    load = partial(_load, interpret=interpret, layout=plgpu.Layout.WGMMA)

    B = _fetch(smem, b, group, head, rows, path, path_x, path_B, x, B, C)
    states = [load(h0.at[b, head, rows, c]) for c in columns]
    decay_T = load(decay.at[b, head, pl.ds(0, _ROWS)])

    plgpu.barrier_wait(smem["scores_ready"])
    (scores,) = _products(shape, (B, smem["C"]))
    _store_parts(smem["W"], decay_T * scores)

    plgpu.barrier_wait(smem["ready"])
    weights = weights.at[b, head]
    states = _replay(states, length[b], weights, smem["path_x"], smem["path_B"])
    for c, state in zip(columns, states, strict=True):
        h[b, head, rows, c] = state
        _store_parts(smem["left"], state, c)  # overwrites B, which is no longer needed

    plgpu.commit_smem()
    W = [z.at[pl.ds(0, shape[1])] for z in smem["W"]]
    carried, added = _products(shape, (smem["left"], smem["C"]), (smem["x"], W))
    growth = _load(decay.at[b, head, _ROWS], interpret)
    y[b, head, rows] = carried * lax.broadcast_in_dim(growth, shape, (1,)) + added


def _scratch(count: int, Q: int, past: Replayed, *parts: Parts) -> dict[str, Any]:
    (x, B, C), M, N = parts, past.path.shape[1], past.B.shape[-1]
    swizzle = 2 * Q
    operand = partial(
        plgpu.SMEM,
        dtype=jnp.bfloat16,
        transforms=(
            plgpu.TilingTransform((8, swizzle // 2)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )
    return {
        "left": [operand((_ROWS, N))] * count,
        "C": [operand((N, Q))] * len(C),
        "x": [operand((_ROWS, Q))] * len(x),
        "W": [operand((_ROWS, Q))] * count,
        "path_x": plgpu.SMEM((M, _ROWS), past.x.dtype),
        "path_B": plgpu.SMEM((M, N), past.B.dtype),
        "scores_ready": plgpu.Barrier(num_arrivals=len(B) + len(C)),
        "ready": plgpu.Barrier(num_arrivals=len(x) + 2 * M),
    }


@int32_inside
def replay_tree_scan(
    h0: Array,
    past: Replayed,
    inputs: ScanInputs,
    mask: Array,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Computes `scan.replay_tree_scan`.

    Args:
      h0, past, inputs, mask: as in `scan.replay_tree_scan`; `unsupported` must return
        None for them.
      interpret: False, or an `InterpretGPUParams` to interpret the kernel on a CPU.

    Returns:
      y [B, T, H, P] and the replayed state [B, H, P, N], both float32.
    """
    x, path = inputs.x, past.path
    fault = faults_of(x, inputs.dt, inputs.B) | decay_faults(inputs.a)
    hit = reached(mask, fault)
    names = ("x", "dt", "a", "B")
    inputs = inputs._replace(**{n: cleared(fault, getattr(inputs, n)) for n in names})
    batch, T, H, P = x.shape
    Q, count = _queries(T), _part_count(x, inputs.B, T, path.shape[1])
    weights = _path_weights(past)
    decay = _decays(inputs.dt, inputs.a, mask, Q)
    parts = _token_parts(inputs, Q, count)
    kernel = plgpu.kernel(
        partial(_body, interpret),
        out_type=(
            jax.ShapeDtypeStruct((batch, H, P, Q), jnp.float32),
            jax.ShapeDtypeStruct(h0.shape, jnp.float32),
        ),
        grid=(batch, H, P // _ROWS),
        grid_names=("batch", "head", "rows"),
        scratch_types=[_scratch(count, Q, past, *parts)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret or None,
        kernel_name="replay_tree_scan",
    )
    y, h = kernel(h0, path, past.length, past.x, past.B, weights, decay, *parts)
    skip = inputs.D.astype(jnp.float32).reshape(1, 1, H, -1) * x.astype(jnp.float32)
    return marked(hit, y[..., :T].transpose(0, 3, 1, 2) + skip), h
