"""Tree attention as a Pallas GPU kernel (Triton backend), flash-style with split-K.

All queries of a KV head (Tq nodes times the Hq/Hk query heads that share it) are rows
of one tile, so the cache is read once for all of them. With s the scores of a row
against one block of keys (-inf where masked) and v the block's values, a program
updates the running maximum m, sum l and weighted values a of its rows:

  m'  =  max(m, max(s))
  l'  =  exp(m - m') l + sum(exp(s - m'))
  a'  =  exp(m - m') a + exp(s - m') v              and in the end out = a / l.

The blocks are those of the cache, from the first row that a query of the tile sees up
to `length`, and then the tree's nodes with their mask. Nothing else is read. To fill a
GPU at small batch sizes, a sequence's blocks are divided among `splits` programs; the
last program also takes the tree. Each program returns its (m, l, a), and a second
kernel sums these with weights exp(m - max m). A sink is a key with value 0, with which
the last program's sums begin.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.triton_blocks import cleared, faults_of, marked, reached
from stree_jax.pallas_kernels.triton_limits import attention_unsupported

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # this jax or jaxlib has no Triton backend
    pl = pltriton = None  # type: ignore[assignment]  # modules, where they exist

Preset = lax.DotAlgorithmPreset
State = tuple[jax.Array, jax.Array, jax.Array]

_LOG2E = 1.4426950408889634  # the kernels' exponentials are powers of two
_LOWEST = float(jnp.finfo(jnp.float32).min)  # initial maximum; -inf - -inf would be NaN
_PROGRAMS = 264  # two per multiprocessor of an H100 or H200, which has 132


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel; all are powers of two, except num_stages.

    Attributes:
      keys: cache rows, or tree nodes, per step of a program.
      rows: queries per program, at least 16.
      splits: programs that divide one sequence's cache.
      num_warps: warps per program.
      num_stages: blocks that a program holds or loads at a time.
      precision: precision of products with a float32 cache. Ignored for bfloat16.
    """

    keys: int
    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2
    precision: Preset = Preset.TF32_TF32_F32_X3


def default_blocks(
    batch: int, Tq: int, Hq: int, Hk: int, S: int, hd: int, dtype: Any
) -> Blocks:
    """Chooses block sizes for an H100 or H200 from the shapes.

    The tiles are the largest that compile without register spills. float32 queries stay
    in registers, as two parts each.
    """
    queries, wide = Tq * (Hq // Hk), jnp.dtype(dtype).itemsize == 4
    most = min(64, 4096 // hd) if wide else 64
    rows = min(_power(queries, 16), most)
    programs = batch * Hk * -(-queries // rows)
    # Combining splits of fewer than 128 cache rows costs more than it saves.
    wanted = max(min(_PROGRAMS // programs, S // 128, 64), 1)
    return Blocks(
        keys=min(32, 4096 // hd) if wide else 64,
        rows=rows,
        splits=1 << (wanted.bit_length() - 1),
        num_warps=8 if rows == most and hd >= (128 if wide else 256) else 4,
        num_stages=3 if wide or hd < 256 else 2,
    )


def _power(n: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least n and at least `least`, itself
    a power of two."""
    return max(1 << (n - 1).bit_length(), least)


def unsupported(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, mask: jax.Array
) -> str | None:
    """Returns why the kernel does not support these arguments of `tree_attention`.

    Returns None if it does. Only shapes and dtypes are checked.
    """
    if pltriton is None:
        return "this jax has no jax.experimental.pallas.triton"
    return attention_unsupported(q, k_cache, v_cache, mask)


class _Operands(NamedTuple):
    """Arguments of `tree_attention`, as arrays, block specs, or a program's refs.

    Attributes:
      q, k, v, k_cache, v_cache, length, mask, first, sink: see
        `attention.tree_attention`.
      scale: [1] float32.
    """

    q: Any
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    length: Any
    mask: Any
    scale: Any
    first: Any
    sink: Any


@int32_inside
def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    scale: jax.typing.ArrayLike,
    first: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `attention.tree_attention`. Cache rows past `length` are not read.

    Args:
      q, k, v, k_cache, v_cache, length, mask, scale, first, sink: as in
        `attention.tree_attention`; `unsupported` must return None for them. q is
        rounded to the cache's dtype.
      blocks: block sizes. If None, those of `default_blocks`.
      interpret: True to run in Pallas's interpreter on any device, with exact float32
        products, for tests.

    Returns:
      [B, Tq, Hq, hd] float32.

    Raises:
      NotImplementedError: the arguments are unsupported.
    """
    reason = unsupported(q, k_cache, v_cache, mask)
    if reason is not None:
        raise NotImplementedError(reason)
    dtype, (Bb, Tq, Hq, hd), (Hk, S) = k_cache.dtype, q.shape, k_cache.shape[1:3]
    cut = blocks or default_blocks(Bb, Tq, Hq, Hk, S, hd, dtype)
    precision: Any = cut.precision
    if dtype == jnp.bfloat16:
        precision = lax.Precision.DEFAULT
    elif interpret:
        precision = lax.Precision.HIGHEST
    k, v, length = k.astype(dtype), v.astype(dtype), length.astype(jnp.int32)
    scale = jnp.asarray(scale, jnp.float32).reshape(1)
    first = None if first is None else first.astype(jnp.int32)
    sink = None if sink is None else sink.astype(jnp.float32)
    operands = _Operands(q, k, v, k_cache, v_cache, length, mask, scale, first, sink)
    parts = _partial_attention(operands, cut, precision, interpret)
    return parts[0] if cut.splits == 1 else _combine(*parts, interpret=interpret)


def _partial_attention(
    operands: _Operands, cut: Blocks, precision: Any, interpret: bool
) -> list[jax.Array]:
    """Runs the kernel. Returns [out] with one split, else [m, l, a] of every split."""
    (Bb, Tq, Hq, hd), T = operands.q.shape, operands.k.shape[1]
    Hk, S = operands.k_cache.shape[1:3]
    G, splits = Hq // Hk, cut.splits
    tiles = -(-Tq * G // cut.rows)

    # The grid's first axis varies fastest, so a head's tiles find its keys in the L2.
    def head(*block: int | None) -> Any:
        """Returns the spec of a KV head's part of an array [B, tokens, heads, hd]."""
        return pl.BlockSpec(block, lambda x, s, b: (b, 0, lax.div(x, tiles), 0))

    def part(*block: int | None) -> Any:
        """Returns the spec of a KV head's part of [B, splits, tokens, heads, ...]."""
        rest = (0,) * (len(block) - 4)
        return pl.BlockSpec(block, lambda x, s, b: (b, s, 0, lax.div(x, tiles), *rest))

    cache = pl.BlockSpec(
        (None, None, S, hd), lambda x, s, b: (b, lax.div(x, tiles), 0, 0)
    )
    queries, new = head(None, Tq, G, hd), head(None, T, None, hd)
    length = pl.BlockSpec((1,), lambda x, s, b: (b,))
    mask = pl.BlockSpec((None, Tq, T), lambda x, s, b: (b, 0, 0))
    scale = pl.BlockSpec((1,), lambda x, s, b: (0,))
    first = sink = None
    if operands.first is not None:
        first = pl.BlockSpec((None, Tq), lambda x, s, b: (b, 0))
    if operands.sink is not None:
        sink = pl.BlockSpec((G,), lambda x, s, b: (lax.div(x, tiles),))
    specs = _Operands(queries, new, new, cache, cache, length, mask, scale, first, sink)
    out_specs = [part(None, None, Tq, G)] * 2 + [part(None, None, Tq, G, hd)]
    shapes: list[tuple[int, ...]] = [(Bb, splits, Tq, Hq)] * 2
    shapes.append((Bb, splits, Tq, Hq, hd))
    if splits == 1:
        out_specs, shapes = [queries], [operands.q.shape]
    return pl.pallas_call(
        partial(_attend, cut=cut, tiles=tiles, precision=precision),
        grid=(Hk * tiles, splits, Bb),
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=pltriton.CompilerParams(
            num_warps=cut.num_warps, num_stages=cut.num_stages
        ),
        interpret=interpret,
        name="tree_attention",
    )(operands)


def _attend(
    refs: _Operands, *out_refs: Any, cut: Blocks, tiles: int, precision: Any
) -> None:
    """Attends one tile of a KV head's queries [Tq, G, hd] to one split of its keys.

    Sizes need not be multiples of the block sizes. Rows past the last query repeat it
    and write the same result; keys past the last one repeat it and are masked.
    """
    (Tq, G, hd), T = refs.q.shape, refs.k.shape[0]
    tile, split = lax.rem(pl.program_id(0), tiles), pl.program_id(1)
    length, scale = refs.length[0], refs.scale[0] * _LOG2E
    row = jnp.minimum(_range(tile, cut.rows), Tq * G - 1)
    t, g = lax.div(row, G), lax.rem(row, G)
    fold = partial(_fold, refs.q[t, g, :].astype(refs.k.dtype), scale, precision)
    begin = None if refs.first is None else refs.first[t]

    def committed(apart: bool, i: jax.Array, state: State) -> State:
        index = _range(i, cut.keys)
        at, seen = jnp.minimum(index, length - 1), (index < length)[None, :]
        if begin is not None:
            seen &= index[None, :] >= begin[:, None]
        return fold(state, refs.k_cache[at, :], refs.v_cache[at, :], seen, apart)

    def inside(i: jax.Array, state: State) -> State:
        index = _range(i, nodes)
        at = jnp.minimum(index, T - 1)
        seen = refs.mask[t[:, None], at[None, :]] & (index < T)[None, :]
        return fold(state, refs.k[at, :], refs.v[at, :], seen, True)

    count = lax.div(length + (cut.keys - 1), cut.keys)
    start = jnp.int32(0)
    if begin is not None:  # it may be past `length`
        start = jnp.minimum(lax.div(begin.min(), cut.keys), count)
    share = lax.div(count - start + (cut.splits - 1), cut.splits)
    first = start + split * share
    last = jnp.minimum(first + share, count)
    nodes = min(_power(T, 16), cut.keys)
    # The number of steps is made data-dependent (length >= 0 is always true): if it
    # were constant, the compiler would unroll a single step and spill registers.
    here = (split == cut.splits - 1) & (length >= 0)
    steps = here.astype(jnp.int32) * -(-T // nodes)
    m = jnp.full((cut.rows,), _LOWEST, jnp.float32)
    total = jnp.zeros((cut.rows,), jnp.float32)
    if refs.sink is not None:
        m = jnp.where(here, jnp.maximum(refs.sink[g] * _LOG2E, m), m)
        total = jnp.where(here, 1.0, total)
    state = m, total, jnp.zeros((cut.rows, hd), jnp.float32)
    if begin is not None:  # blocks that a query sees in part
        edge = lax.div(begin.max() + (cut.keys - 1), cut.keys)
        edge = jnp.clip(edge, first, jnp.maximum(first, last))
        state = lax.fori_loop(first, edge, partial(committed, True), state)
        first = edge
    state = lax.fori_loop(first, last, partial(committed, False), state)
    m, total, a = lax.fori_loop(0, steps, inside, state)

    if cut.splits == 1:
        out_refs[0][t, g, :] = a / total[:, None]
    else:
        out_refs[0][t, g] = m
        out_refs[1][t, g] = total
        out_refs[2][t, g, :] = a


def _fold(
    q: jax.Array,
    scale: jax.Array,
    precision: Any,
    state: State,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    apart: bool,
) -> State:
    """Updates (m, l, a) of the rows q with a block of keys; see the module's docstring.

    If the queries see different keys (`apart`), values with NaN or infinity are
    replaced by zeros, and the rows that see them become NaN.
    """
    dot = partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    m, total, a = state
    s = jnp.where(seen, dot(q, keys.T) * scale, -jnp.inf)
    top = jnp.maximum(m, s.max(1))
    old, p = jnp.exp2(m - top), jnp.exp2(s - top[:, None])
    if apart:
        fault = faults_of(values)
        a = marked(reached(seen, fault), a)
        values = cleared(fault, values)
    a = old[:, None] * a + dot(p.astype(values.dtype), values)
    return top, old * total + p.sum(1), a


def _range(i: jax.Array, size: int) -> jax.Array:
    """Returns the indices of block i of a given size."""
    return i * size + lax.iota(jnp.int32, size)


def _combine(
    m: jax.Array, total: jax.Array, a: jax.Array, *, interpret: bool
) -> jax.Array:
    """Combines the splits' maxima and sums [B, splits, Tq, Hq] and weighted values
    [B, splits, Tq, Hq, hd] to the output [B, Tq, Hq, hd]."""
    Bb, splits, Tq, Hq, hd = a.shape
    scalars = pl.BlockSpec((None, splits, None, None), lambda h, t, b: (b, 0, t, h))
    vectors = pl.BlockSpec(
        (None, splits, None, None, hd), lambda h, t, b: (b, 0, t, h, 0)
    )
    num_warps = min(max(splits * hd // 2048, 1), 8)  # 64 values per thread
    return pl.pallas_call(
        _sum_splits,
        grid=(Hq, Tq, Bb),
        in_specs=[scalars, scalars, vectors],
        out_specs=pl.BlockSpec((None, None, None, hd), lambda h, t, b: (b, t, h, 0)),
        out_shape=jax.ShapeDtypeStruct((Bb, Tq, Hq, hd), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="combine_splits",
    )(m, total, a)


def _sum_splits(m_ref: Any, total_ref: Any, a_ref: Any, out_ref: Any) -> None:
    m = m_ref[...]
    w = jnp.exp2(m - m.max(0))
    out_ref[...] = (w[:, None] * a_ref[...]).sum(0) / (w * total_ref[...]).sum(0)
