"""`scan.tree_scan` and `scan.replay_tree_scan` as one Pallas GPU kernel (Triton
backend).

There is one program per sequence, head and block of the head's channels. It reads its
part of the state once, in chunks along N. For each chunk it computes

    h      = exp(sum_j a_j) h0 + sum_j exp(sum_{i > j} a_i) dt_j x_j (outer) B_j
    scores = C . B        (over the tree's tokens)
    carry  = C . h

before it reads the next one; h is written once, in place of h0. The rest is small:

    y = exp(Acum_t) carry + (decay_ts dt_s scores_ts) x_s + D x_t

Inputs are not padded: blocks of 16, 32 or 64 tokens are gathered by row number, and
rows past the last token repeat it. As keys these rows are masked; as queries they are
cut off the result.

Products run on tensor cores with float32 sums. Products of two bfloat16 values are
exact. If one factor is float32, it is split into three bfloat16 parts that sum to it,
so these products are exact, too. For two float32 factors see `Blocks.precision`.

From jax 0.11 on, lowering the kernel emits a DeprecationWarning about the Triton
backend. Under jit this happens when the caller compiles, so this module cannot filter
it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.scan import FORGOTTEN, Replayed, ScanInputs

try:
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # this jax has no Triton backend: see `unsupported`
    pltriton = None  # type: ignore[assignment]  # a module, where it exists

MAX_TOKENS = 64
_MIN_TILE = 16  # smallest side of a tensor core product


@dataclass(frozen=True)
class Blocks:
    """Block sizes and precision of the kernel.

    Attributes:
      head: channels of a head per program, a power of two >= 16 that divides P.
      state: columns of N per chunk, a power of two >= 16 that divides N.
      num_warps, num_stages: as in Triton.
      precision: precision of products of two float32 factors, as relative error:
        "tf32x3" (2^-21, three tensor core passes), "bf16x3" (2^-16, three passes with
        fewer registers) or "highest" (2^-24, without tensor cores, also for bfloat16).
    """

    head: int = 32
    state: int = 32
    num_warps: int = 4
    num_stages: int = 3
    precision: str = "tf32x3"


_PRECISIONS: dict[str, Any] = {
    "tf32x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "highest": lax.Precision.HIGHEST,
    "interpret": lax.Precision.HIGHEST,
}
_GPU_ONLY = ("tf32x3", "bf16x3")  # precisions that the interpreter does not have


def default_blocks(T: int, P: int, N: int, dtype: Any) -> Blocks:
    """Chooses blocks that compile for sm_90 without register spills and with pipelined
    loads."""
    crowded = dtype == jnp.float32 and T > _MIN_TILE
    return Blocks(head=min(32, P & -P), state=min(16 if crowded else 32, N & -N))


def unsupported(
    x: jax.Array, B: jax.Array, mask: jax.Array, path: jax.Array | None = None
) -> str | None:
    """Returns why the kernel does not support these shapes and dtypes. None if it does.

    Args:
      x, B, mask, path: as in `scan.replay_tree_scan`, or their shapes and dtypes.
    """
    if pltriton is None:
        return "this jax has no Triton backend of Pallas"
    for name, z in (("x", x), ("B", B)):
        if z.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {z.dtype}, neither float32 nor bfloat16"
    if mask.shape[-1] > MAX_TOKENS:
        return f"{mask.shape[-1]} tokens are more than {MAX_TOKENS}"
    if path is not None and path.shape[-1] > MAX_TOKENS:
        return f"a path of {path.shape[-1]} tokens is longer than {MAX_TOKENS}"
    for name, size in (("head", x.shape[-1]), ("state", B.shape[-1])):
        if size % _MIN_TILE:
            return f"the {name} size {size} is not a multiple of {_MIN_TILE}"
    return None


class _Tree(NamedTuple):
    """Inputs of the scan, as arrays, as refs, or as block specs.

    Attributes:
      inputs: `ScanInputs`.
      mask: [B, T, T] int8.
      rows: [Tq] int32. If None, all tokens are queried.
    """

    inputs: Any
    mask: Any
    rows: Any


def _tile(count: int) -> int:
    """Returns the size of the smallest block that holds `count` tokens."""
    return max(_MIN_TILE, 1 << (count - 1).bit_length())


def _numbers(count: int) -> jax.Array:
    """Returns 0, 1, ..., count - 1, then count - 1 repeated up to the block's size."""
    numbers = lax.iota(jnp.int32, _tile(count))
    if numbers.size == count:  # the compiler loads a plain range in wide words
        return numbers
    return jnp.minimum(numbers, count - 1)


def _parts(z: jax.Array) -> list[jax.Array]:
    """Splits the float32 z into three bfloat16 arrays that sum to it, smallest first.

    Bits are truncated, not rounded: a compiler may remove a conversion and its inverse.
    """
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(z, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        z = z - part
    return [z.astype(jnp.bfloat16), *reversed(parts)]


def _product(
    left: jax.Array, right: jax.Array, axes: tuple[int, int], precision: str
) -> jax.Array:
    """Contracts `axes` of two matrices in float32; see the module's docstring."""

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        exact = left.dtype != jnp.float32
        return lax.dot_general(
            left,
            right,
            (((axes[0],), (axes[1],)), ((), ())),
            precision=_PRECISIONS["highest" if exact else precision],
            preferred_element_type=jnp.float32,
        )

    if precision == "highest":
        return dot(left.astype(jnp.float32), right.astype(jnp.float32))
    if left.dtype == right.dtype:
        return dot(left, right)
    if left.dtype == jnp.float32:
        small, middle, large = (dot(part, right) for part in _parts(left))
    else:
        small, middle, large = (dot(left, part) for part in _parts(right))
    return small + middle + large


def _path_sums(allowed: jax.Array, a: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """Sums hi and lo of `scan.exact_split` of a [T] along the paths; returns both
    [Tq]."""
    a = jnp.maximum(a, FORGOTTEN)
    quantum = -FORGOTTEN * 2.0 ** (math.ceil(math.log2(T)) - 24)
    hi = jnp.floor(a * (1 / quantum) + 0.5) * quantum
    sums = (jnp.where(allowed, z[None], 0.0).sum(axis=1) for z in (hi, a - hi))
    return next(sums), next(sums)


def _replay(past: Any, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that replays the path on a part of the state.

    Args:
      past: `Replayed` of refs.
      product: matrix product, see `_product`.
    """
    M = past.path.shape[0]
    j = lax.iota(jnp.int32, _tile(M))
    valid = j < jnp.minimum(past.length[...], M)
    row = jnp.where(valid, past.path[_numbers(M)], 0)
    dt = jnp.where(valid, past.dt[row], 0.0)
    a = jnp.where(valid, past.a[row], 0.0)
    after = jnp.where(j[None] > j[:, None], a[None], 0.0).sum(axis=1)
    weighted = (jnp.exp(after) * dt)[:, None] * past.x[row, :].astype(jnp.float32)
    kept = jnp.exp(a.sum())

    def replay(state: jax.Array, part: Any) -> jax.Array:
        return kept * state + product(weighted, past.B[row, part], (0, 0))

    return replay


def _weights(
    mask: jax.Array, mask_q: jax.Array, a: jax.Array, dt: jax.Array, T: int
) -> tuple[jax.Array, jax.Array]:
    """Computes exp(Acum_t) [Tq] and decay_ts dt_s [Tq, T] for a block of T tokens."""
    real = lax.iota(jnp.int32, a.size)[None] < T
    allowed, allowed_q = ((m != 0) & real for m in (mask, mask_q))
    hi, lo = _path_sums(allowed, a, T)
    hi_q, lo_q = (hi, lo) if mask_q is mask else _path_sums(allowed_q, a, T)
    # Mask the exponent before exp: off the path it can be large and positive.
    difference = (hi_q[:, None] - hi[None]) + (lo_q[:, None] - lo[None])
    decay = jnp.exp(jnp.where(allowed_q, difference, -jnp.inf))
    return jnp.exp(hi_q + lo_q), decay * dt[None]


def _kernel(h0: Any, past: Any, tree: _Tree, h: Any, y: Any, *, blocks: Blocks) -> None:
    """Runs one program. The refs have no batch and head axes: h0 and h are [head, N], y
    is [Tq, head]."""
    product = partial(_product, precision=blocks.precision)
    inputs = tree.inputs
    T = inputs.dt.shape[0]
    key, query = _numbers(T), _numbers(inputs.C.shape[0])
    # Start loading the inputs that are used after the loop, so they arrive meanwhile.
    x, dt, a = inputs.x[key, :], inputs.dt[key], inputs.a[key]
    mask = tree.mask[key[:, None], key[None]]
    x_q, mask_q = x, mask
    if tree.rows is not None:
        row = jnp.clip(tree.rows[query], 0, T - 1)
        x_q, mask_q = inputs.x[row, :], tree.mask[row[:, None], key[None]]
    replay = None if past is None else _replay(past, product)

    def chunk(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores, carried = sums
        part = pl.ds(i * blocks.state, blocks.state)
        state = h0[:, part]
        if replay is not None:
            state = replay(state, part)
            h[:, part] = state
        C = inputs.C[query, part]
        scores = scores + product(C, inputs.B[key, part], (1, 1))
        return scores, carried + product(C, state, (1, 1))

    zero = partial(jnp.zeros, dtype=jnp.float32)
    sums = zero((query.size, key.size)), zero((query.size, blocks.head))
    scores, carried = lax.fori_loop(0, h0.shape[1] // blocks.state, chunk, sums)

    grown, weight = _weights(mask, mask_q, a, dt, T)
    D = inputs.D[...].astype(jnp.float32)
    skip = (D if D.ndim == 0 else D[None]) * x_q.astype(jnp.float32)
    mixed = product(weight * scores, x, (1, 0))
    y[...] = grown[:, None] * carried + mixed + skip


def _specs(past: Replayed | None, tree: _Tree, head: int) -> tuple[Any, _Tree]:
    """Returns the block specs of the inputs: the part of each that a program reads."""
    inputs: ScanInputs = tree.inputs
    heads_per_group = inputs.x.shape[2] // inputs.B.shape[2]

    def sequence(z: jax.Array) -> Any:  # a block that holds a whole sequence
        rest = (0,) * (z.ndim - 1)
        return pl.BlockSpec((None, *z.shape[1:]), lambda b, h, p: (b, *rest))

    def steps(z: jax.Array) -> Any:
        return pl.BlockSpec((None, z.shape[1], None), lambda b, h, p: (b, 0, h))

    def channels(z: jax.Array) -> Any:
        block = (None, z.shape[1], None, head)
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h, p))

    def group(z: jax.Array) -> Any:
        block = (None, z.shape[1], None, z.shape[3])
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h // heads_per_group, 0))

    def tokens(z: Replayed | ScanInputs) -> tuple[Any, Any, Any, Any]:
        return channels(z.x), steps(z.dt), steps(z.a), group(z.B)

    D: Any
    if inputs.D.ndim == 1:
        D = pl.BlockSpec((None,), lambda b, h, p: (h,))
    else:
        D = pl.BlockSpec((None, head), lambda b, h, p: (h, p))
    rows = None
    if tree.rows is not None:
        rows = pl.BlockSpec(tree.rows.shape, lambda b, h, p: (0,))
    tree_inputs = ScanInputs(*tokens(inputs), group(inputs.C), D)
    tree_specs = _Tree(tree_inputs, sequence(tree.mask), rows)
    if past is None:
        return None, tree_specs
    path, length = sequence(past.path), sequence(past.length)
    return Replayed(*tokens(past), path, length), tree_specs


@int32_inside
def _call(
    h0: jax.Array,
    past: Replayed | None,
    tree: _Tree,
    blocks: Blocks | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel and returns (h, y). Without `past`, h is h0."""
    batch, H, P, N = h0.shape
    T, Tq = tree.inputs.dt.shape[1], tree.inputs.C.shape[1]
    blocks = blocks or default_blocks(T, P, N, tree.inputs.x.dtype)
    if interpret and blocks.precision in _GPU_ONLY:
        blocks = replace(blocks, precision="interpret")
    state = pl.BlockSpec((None, None, blocks.head, N), lambda b, h, p: (b, h, p, 0))
    y_shape = (batch, _tile(Tq), H, P)
    y_block = (None, y_shape[1], None, blocks.head)
    y_spec = pl.BlockSpec(y_block, lambda b, h, p: (b, 0, h, p))
    y_type = jax.ShapeDtypeStruct(y_shape, jnp.float32)
    h_type = jax.ShapeDtypeStruct(h0.shape, jnp.float32)
    replays = past is not None
    params = None
    if not interpret:
        params = pltriton.CompilerParams(
            num_warps=blocks.num_warps, num_stages=blocks.num_stages
        )
    h, y = pl.pallas_call(
        partial(_kernel, blocks=blocks),
        out_shape=(h_type if replays else None, y_type),
        grid=(batch, H, P // blocks.head),
        in_specs=(state, *_specs(past, tree, blocks.head)),
        out_specs=(state if replays else None, y_spec),
        input_output_aliases={0: 0} if replays else {},
        compiler_params=params,
        interpret=interpret,
        name="replay_tree_scan" if replays else "tree_scan",
    )(h0, past, tree)
    return h if replays else h0, y[:, :Tq]


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
    tree = _Tree(inputs, mask.astype(jnp.int8), None)
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
    tree = _Tree(inputs, mask.astype(jnp.int8), rows)
    return _call(h0, None, tree, blocks, interpret)[1]
