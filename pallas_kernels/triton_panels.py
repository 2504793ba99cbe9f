"""Computes products with weights in panels on a GPU, with Pallas (Triton backend).

Computes `panel_product` for up to 64 rows. A program multiplies `Blocks.rows` rows of
the matrix, on the left of tensor core products, by all rows of the input. It unpacks 32
columns (16 if the scales are for 16) in registers, multiplies these exact integers in
bfloat16 with float32 sums, and scales the exact sums. With two planes of int8 there are
two such products per block.

The panels are read as they are: thanks to their order, each thread loads four
consecutive columns at a time. To fill a GPU, the columns are divided among `splits`
programs, whose results are summed outside.

A result has the same bits with any number of rows: the order of the sums depends only
on the matrix.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.models.weights.panels.kind import (
    BLOCK,
    LANES,
    VECTOR,
    WORD,
    PanelKind,
)
from stree_jax.models.weights.panels.product import group_size, rounded
from stree_jax.pallas_kernels.dispatch import int32_inside

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # this jax or jaxlib has no Triton backend
    pl = pltriton = None  # type: ignore[assignment]  # modules, where they exist

MAX_ROWS = 64
MIN_ROWS = 16  # smallest side of a tensor core product
_PROGRAMS = 528  # four per multiprocessor of an H100 or H200, which has 132
_MAX_BYTES = 2**31  # offsets are int32
_128 = np.int16(0x4300)  # 128 in bfloat16, whose low 7 bits are then an integer


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
      rows: rows of the matrix per program, a power of two >= 16.
      splits: programs that divide the columns of a row.
      num_warps, num_stages: as in Triton.
    """

    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2


def default_blocks(m: int, k: int, kind: PanelKind, planes: int) -> Blocks:
    """Chooses block sizes for an H100 or H200. They do not depend on the number of
    input rows."""
    programs = -(-m // 64)
    chunks = k // _chunk(k, kind, planes)
    wanted = max(min(_PROGRAMS // programs, chunks), 1)
    return Blocks(rows=64, splits=1 << (wanted.bit_length() - 1))


def _chunk(k: int, kind: PanelKind, planes: int) -> int:
    """Returns the columns of a step of the kernel's loop."""
    return max(kind.tile, group_size(k, planes))


def unsupported(
    rows: jax.Array, panels: jax.Array, kind: PanelKind, planes: int
) -> str | None:
    """Returns why the kernel does not support these arguments of `panel_product`.

    Returns None if it does. Only shapes and dtypes are checked.
    """
    if pltriton is None:
        return "this jax has no jax.experimental.pallas.triton"
    t, k = rows.shape
    if not 0 < t <= MAX_ROWS:
        return f"{t} rows, not 1 to {MAX_ROWS}"
    if 0 in panels.shape:
        return "an empty matrix"
    if panels.size >= _MAX_BYTES:
        return f"a matrix of {panels.size} bytes, 2 GiB or more"
    chunk = _chunk(k, kind, planes)
    if chunk % kind.tile or chunk % group_size(k, planes):
        return f"tiles of {kind.tile} columns, groups of {group_size(k, planes)}"
    return None


class _Operands(NamedTuple):
    """Inputs of the kernel, as arrays or as refs.

    Attributes:
      planes: [t, k] bfloat16 each, integers.
      scale: [t, G] float32.
      sums: [t, k / 32] float32, sums of the integers of each block. None if the kind
        has no minima.
      panels: [P n nbytes] uint8.
      values: [16] bfloat16, what numbers stand for. None if it is the number less a
        zero.
    """

    planes: Any
    scale: Any
    sums: Any
    panels: Any
    values: Any


@int32_inside
def panel_product(
    rows: jax.Array,
    panels: jax.Array,
    kind: PanelKind,
    planes: int,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `panels.product.panel_product`.

    Args:
      rows, panels, kind, planes: as there; `unsupported` must return None for them.
      blocks: block sizes. If None, those of `default_blocks`.
      interpret: True to run in Pallas's interpreter on any device, for tests.

    Raises:
      NotImplementedError: the arguments are unsupported.
    """
    reason = unsupported(rows, panels, kind, planes)
    if reason is not None:
        raise NotImplementedError(reason)
    (t, k), m = rows.shape, panels.shape[0] * LANES
    cut = blocks or default_blocks(m, k, kind, planes)
    x = rounded(rows, planes)
    sums = values = None
    if kind.has_minima:
        parts = [z.reshape(t, -1, BLOCK).sum(axis=-1) for z in x.planes]
        sums = _whole(parts)
    if kind.values is not None:
        values = jnp.asarray([v - kind.zero for v in kind.values], jnp.bfloat16)
    operands = _Operands(
        tuple(z.astype(jnp.bfloat16) for z in x.planes),
        x.scale,
        sums,
        panels.reshape(-1),
        values,
    )
    y = pl.pallas_call(
        partial(_multiply, kind=kind, cut=cut, tiles=panels.shape[1]),
        grid=(-(-m // cut.rows), cut.splits),
        out_shape=jax.ShapeDtypeStruct((cut.splits, t, m), jnp.float32),
        compiler_params=pltriton.CompilerParams(
            num_warps=cut.num_warps, num_stages=cut.num_stages
        ),
        interpret=interpret,
        name="panel_product",
    )(operands)
    return y[0] if cut.splits == 1 else y.sum(axis=0)


def _whole(planes: Any) -> jax.Array:
    """Combines the planes of rows, or sums of them."""
    return planes[0] if len(planes) == 1 else 256 * planes[0] + planes[1]


def _multiply(
    refs: _Operands, out_ref: Any, *, kind: PanelKind, cut: Blocks, tiles: int
) -> None:
    """Multiplies some rows of the matrix by one split of the columns of all input rows.

    Indices past the last row of either repeat it and write the same result.
    """
    (t, k), m = refs.planes[0].shape, out_ref.shape[2]
    group = k // refs.scale.shape[1]
    chunk = max(kind.tile, group)
    size = max(MIN_ROWS, 1 << (t - 1).bit_length())
    at = jnp.minimum(lax.iota(jnp.int32, size), t - 1)
    row = pl.program_id(0) * cut.rows + lax.iota(jnp.int32, cut.rows)
    row = jnp.minimum(row, m - 1)
    panel = lax.div(row, LANES) * (tiles * kind.nbytes)
    zero = jnp.zeros((cut.rows, size), jnp.float32)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        acc = zero
        for j in range(chunk // BLOCK):  # blocks of 32 columns
            of_chunk, block = divmod(j * BLOCK, kind.tile)
            tile = panel + (i * (chunk // kind.tile) + of_chunk) * kind.nbytes
            part = _Block(refs.panels, refs.values, kind, tile, lax.rem(row, LANES))
            column = i * chunk + j * BLOCK
            acc = _add_block(acc, refs, part, block // BLOCK, at, column)
            if (j + 1) * BLOCK % group == 0:
                g = i * (chunk // group) + j * BLOCK // group
                total, acc = total + acc * refs.scale[at, g][None, :], zero
        return total

    share = -(-(k // chunk) // cut.splits)
    first = pl.program_id(1) * share
    last = jnp.minimum(first + share, k // chunk)
    total = lax.fori_loop(first, last, step, zero)
    out_ref[pl.program_id(1), at[None, :], row[:, None]] = total


@dataclass(frozen=True)
class _Block:
    """The rows of a program in one tile.

    Attributes:
      panels, values: refs, see `_Operands`.
      kind: the kind of the panels.
      tile: [rows] int32, offset of each row's tile.
      lane: [rows] int32, row of the panel.
    """

    panels: Any
    values: Any
    kind: PanelKind
    tile: jax.Array
    lane: jax.Array

    def number(self, field: int, index: int) -> jax.Array:
        """Loads number `index` of a field of scales: [rows]."""
        begin = sum(f.nbytes for f in self.kind.fields[:field])
        dtype = np.dtype(self.kind.fields[field].dtype)
        begin += index * LANES * dtype.itemsize
        at = self.tile + begin + self.lane * dtype.itemsize
        if dtype.itemsize == 1:
            return lax.bitcast_convert_type(self.panels[at], dtype)
        wide = jnp.dtype(f"uint{8 * dtype.itemsize}")
        bits = self.panels[at].astype(wide)
        for i in range(1, dtype.itemsize):
            bits = bits | (self.panels[at + i].astype(wide) << wide.type(8 * i))
        return lax.bitcast_convert_type(bits, dtype)

    def integers(self, block: int, begin: int, width: int) -> jax.Array:
        """Loads numbers `begin` to `begin + width` of a block of 32: [rows, width]
        bfloat16."""
        bits, zero = self.kind.bits, self.kind.zero
        k = begin + lax.iota(jnp.int32, width)
        byte, vector = lax.rem(k, WORD), lax.div(k, WORD)
        first = self.kind.head + block * bits * VECTOR

        def load(vector: jax.Array | int) -> jax.Array:
            offset = (first + vector * VECTOR + byte)[None, :]
            return self.panels[self.tile[:, None] + self.lane[:, None] * WORD + offset]

        if bits == 8:
            return (load(vector).astype(jnp.float32) - zero).astype(jnp.bfloat16)
        shift = (lax.div(vector, 4) * 4).astype(jnp.uint8)
        q = (load(lax.rem(vector, 4)) >> shift[None, :]) & np.uint8(15)
        if bits > 4:
            each = bits - 4
            per = 8 // each  # vectors of numbers with bits in one byte
            shift = (lax.rem(vector, per) * each).astype(jnp.uint8)
            high = load(4 + lax.div(vector, per)) >> shift[None, :]
            q = q | ((high & np.uint8(2**each - 1)) << np.uint8(4))
        if self.values is not None:
            return self.values[q.astype(jnp.int32)]
        exact = lax.bitcast_convert_type(q.astype(jnp.int16) | _128, jnp.bfloat16)
        return exact - jnp.bfloat16(128 + zero)


def _add_block(
    acc: jax.Array,
    refs: _Operands,
    part: _Block,
    block: int,
    at: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """Adds a block of 32 columns, before the scales of the input rows: [rows, t]."""
    width = min(part.kind.block, BLOCK)
    for begin in range(0, BLOCK, width):
        w = part.integers(block, begin, width)
        columns = column + begin + lax.iota(jnp.int32, width)
        dots = [_dot(w, x[at[:, None], columns[None, :]]) for x in refs.planes]
        index = (block * BLOCK + begin) // part.kind.block
        scale, minimum = part.kind.scale_of(part.number, index)
        acc = acc + _whole(dots) * scale[:, None]
        if minimum is not None:
            of_rows = refs.sums[at, lax.div(column, BLOCK)]
            acc = acc + of_rows[None, :] * minimum[:, None]
    return acc


def _dot(w: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies [rows, columns] by [t, columns].T, with float32 sums."""
    return lax.dot_general(
        w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
