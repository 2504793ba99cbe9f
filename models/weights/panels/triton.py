"""A Pallas kernel (Triton backend) for products with weights in panels on GPUs.

Computes `panel_product` for up to 64 rows. A program multiplies `Blocks.rows` rows of
the matrix by all rows of the input. It unpacks 32 columns at a time to int8 and
multiplies them with the planes of the input on tensor cores, with exact int32 sums. It
scales these sums in float32 and adds them in the order of the columns.

The panels are read as they are: each thread loads four consecutive columns of a row. To
fill a GPU, the columns are divided among `splits` programs, whose results are summed
outside. The order of all sums depends only on the matrix, so the bits of a result do
not depend on the number of rows.
"""

from dataclasses import dataclass
from functools import partial, reduce
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
MIN_TILE = 16  # smallest side of a tensor core product
MAX_TILE = 64  # most rows per program, of both planes; more spill registers
_PROGRAMS = 528  # four per multiprocessor of an H100 or H200, which has 132
_MAX_BYTES = 2**31  # offsets are int32


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
    chunks = k // _chunk(k, kind, planes)
    wanted = -(-_PROGRAMS // -(-m // 64))
    share = -(-chunks // min(wanted, chunks))  # chunks per split
    return Blocks(rows=64, splits=-(-chunks // share))


def _chunk(k: int, kind: PanelKind, planes: int) -> int:
    """Returns the number of columns that one step of the kernel's loop multiplies."""
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

    Each input row is rounded to integers with one or two int8 planes. The kernel treats
    every plane of every input row as a row: R = planes * input rows.

    Attributes:
      rows: [B, R, k] int8, the planes. The matrix has B scales in each block of 32
        columns (1, or 2 if a scale belongs to 16 columns). Copy b has zeros in the
        columns that do not belong to scale b, so that its product is the sum for that
        scale.
      scale: [R, G] float32, the scales of the input rows.
      sums: [R, k / 32] float32, the sum of each block's integers, which is multiplied
        by the block's minimum. None if the kind has no minima.
      panels: [P n nbytes] uint8, the matrix.
      fields: for each field of the kind, the bytes of `panels` as numbers of the
        field's dtype.
      values: [16] int8, the integer `values[q] - zero` of each stored number q. None if
        the kind has no table of values; the integer is then q - zero.
    """

    rows: Any
    scale: Any
    sums: Any
    panels: Any
    fields: Any
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
    integers = jnp.concatenate(x.planes)
    powers = [256.0 ** (planes - 1 - i) for i in range(planes)]
    sums = values = None
    if kind.has_minima:
        sums = integers.reshape(len(integers), -1, BLOCK).sum(axis=-1)
    if kind.values is not None:
        values = jnp.asarray([v - kind.zero for v in kind.values], jnp.int8)
    operands = _Operands(
        _by_scale(integers.astype(jnp.int8), min(kind.block, BLOCK)),
        jnp.concatenate([x.scale * power for power in powers]),
        sums,
        panels.reshape(-1),
        tuple(_viewed(panels, field.dtype) for field in kind.fields),
        values,
    )
    y = pl.pallas_call(
        partial(
            _multiply,
            kind=kind,
            cut=cut,
            tiles=panels.shape[1],
            bytes=_Bytes if interpret else _BytesInWords,
        ),
        grid=(-(-planes * t // MAX_TILE), -(-m // cut.rows), cut.splits),
        out_shape=jax.ShapeDtypeStruct((cut.splits, planes * t, m), jnp.float32),
        compiler_params=pltriton.CompilerParams(
            num_warps=cut.num_warps, num_stages=cut.num_stages
        ),
        interpret=interpret,
        name="panel_product",
    )(operands)
    # One by one: the order of a sum over an axis would depend on the number of rows.
    return reduce(jnp.add, y.reshape(cut.splits * planes, t, m))


def _by_scale(rows: jax.Array, width: int) -> jax.Array:
    """Returns the B copies [B, R, k] of rows [R, k] that `_Operands.rows` describes,
    for a matrix with a scale for each `width` columns: B = 32 / width."""
    which = jnp.arange(rows.shape[1]) % BLOCK // width
    here = which[None, :] == jnp.arange(BLOCK // width)[:, None]
    return jnp.where(here[:, None], rows[None], jnp.int8(0))


def _viewed(panels: jax.Array, dtype: Any) -> jax.Array:
    """Returns the bytes of panels as a flat array of another dtype. XLA makes no
    copy."""
    size = np.dtype(dtype).itemsize
    shape = (-1,) if size == 1 else (-1, size)
    return lax.bitcast_convert_type(panels.reshape(shape), np.dtype(dtype))


class _Bytes:
    """Operations on arrays [rows, 32] uint8, for the interpreter."""

    @staticmethod
    def take(x: jax.Array, shift: int, mask: jax.Array, others: jax.Array) -> jax.Array:
        """Takes bits of x and combines them with other bits by "or".

        Args:
          x, mask, others: uint8. The mask excludes bits that a shift would move in
            from neighbouring bytes.
          shift: bits by which x is shifted to the left, or to the right if negative.
        """
        moved = x << np.uint8(shift) if shift >= 0 else x >> np.uint8(-shift)
        return (moved & mask) | others

    @staticmethod
    def less(x: jax.Array, zero: int) -> jax.Array:
        """Computes x - zero in int8, for x and zero below 128."""
        return lax.bitcast_convert_type(x - np.uint8(zero), jnp.int8)


class _BytesInWords(_Bytes):
    """The operations of `_Bytes` on four bytes at a time; Triton itself computes them
    one by one, which takes twice as many instructions in the kernel."""

    @staticmethod
    def take(x: jax.Array, shift: int, mask: jax.Array, others: jax.Array) -> jax.Array:
        moved = f"{'shl' if shift > 0 else 'shr'}.b32 t, $1, {abs(shift)};"
        taken = _in_words(
            f"{moved} and.b32 t, t, $2; or.b32 $0, t, $3;", x, mask, others
        )
        return lax.bitcast_convert_type(taken, jnp.uint8)

    @staticmethod
    def less(x: jax.Array, zero: int) -> jax.Array:
        if zero == 0:
            return lax.bitcast_convert_type(x, jnp.int8)
        # Bit 7 is set during the subtraction, so that no byte borrows from the next.
        high, zeros = 0x80808080, zero * 0x01010101
        return _in_words(
            f"or.b32 t, $1, {high}; sub.u32 t, t, {zeros}; xor.b32 $0, t, {high};", x
        )


def _in_words(assembly: str, *args: jax.Array) -> jax.Array:
    """Computes an int8 array from words of four bytes of arrays of the same shape."""
    (y,) = pltriton.elementwise_inline_asm(
        f"{{ .reg .b32 t; {assembly} }}",
        args=args,
        constraints=",".join(["=r", *["r"] * len(args)]),
        pack=4,
        # Pallas (jax 0.10.2) gives an unsigned result a type that Triton rejects.
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.int8)],
    )
    return y


def _multiply(
    refs: _Operands,
    out_ref: Any,
    *,
    kind: PanelKind,
    cut: Blocks,
    tiles: int,
    bytes: type[_Bytes],
) -> None:
    """Runs one program of the kernel: multiplies a block of the matrix's rows by a
    block of the input's rows, over one split of the columns.

    Row indices after the last row of the matrix or of the input are replaced by that
    row. Several threads then write the same result to the same place.
    """
    (R, k), m = refs.rows.shape[1:], out_ref.shape[2]
    group = k // refs.scale.shape[1]
    chunk = max(kind.tile, group)
    size = min(max(MIN_TILE, 1 << (R - 1).bit_length()), MAX_TILE)
    at = pl.program_id(0) * size + lax.iota(jnp.int32, size)
    at = jnp.minimum(at, R - 1)
    row = pl.program_id(1) * cut.rows + lax.iota(jnp.int32, cut.rows)
    row = jnp.minimum(row, m - 1)
    panel = lax.div(row, LANES) * (tiles * kind.nbytes)
    zero = jnp.zeros((cut.rows, size), jnp.float32)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        acc = zero
        for j in range(chunk // BLOCK):  # blocks of 32 columns
            of_chunk, block = divmod(j * BLOCK, kind.tile)
            tile = panel + (i * (chunk // kind.tile) + of_chunk) * kind.nbytes
            part = _Block(refs, kind, bytes, tile, lax.rem(row, LANES))
            column = i * chunk + j * BLOCK
            acc = _add_block(acc, refs, part, block // BLOCK, at, column)
            if (j + 1) * BLOCK % group == 0:
                g = i * (chunk // group) + j * BLOCK // group
                total, acc = total + acc * refs.scale[at, g][None, :], zero
        return total

    share = -(-(k // chunk) // cut.splits)
    first = pl.program_id(2) * share
    last = jnp.minimum(first + share, k // chunk)
    total = lax.fori_loop(first, last, step, zero)
    out_ref[pl.program_id(2), at[None, :], row[:, None]] = total


@dataclass(frozen=True)
class _Block:
    """The part of a tile that belongs to one program's rows of the matrix.

    Attributes:
      refs: see `_Operands`.
      kind: the kind of the panels.
      bytes: operations on bytes.
      tile: [rows] int32. For each row, the offset in bytes of its tile in
        `refs.panels`.
      lane: [rows] int32. Index of each row in its panel, 0 to 15.
    """

    refs: _Operands
    kind: PanelKind
    bytes: type[_Bytes]
    tile: jax.Array
    lane: jax.Array

    def number(self, field: int, index: int) -> jax.Array:
        """Loads one scale for each row: [rows] in the field's dtype.

        Args:
          field: index of the field in `kind.fields`.
          index: index of the scale among the field's `count` numbers of a row.
        """
        size = np.dtype(self.kind.fields[field].dtype).itemsize
        begin = sum(f.nbytes for f in self.kind.fields[:field]) // size
        at = lax.div(self.tile, size) + (begin + index * LANES) + self.lane
        return self.refs.fields[field][at]

    def integers(self, block: int) -> jax.Array:
        """Loads the numbers q of a block of 32 columns and returns the integers that
        they stand for, after subtracting `kind.zero`: [rows, 32] int8.

        Args:
          block: index of the block in the tile.
        """
        bits, zero = self.kind.bits, self.kind.zero
        k = lax.iota(jnp.int32, BLOCK)
        byte, vector = lax.rem(k, WORD), lax.div(k, WORD)
        first = self.tile + self.kind.head + block * bits * VECTOR + self.lane * WORD

        def load(vector: jax.Array) -> jax.Array:
            return self.refs.panels[first[:, None] + (vector * VECTOR + byte)[None, :]]

        if bits == 8:
            return lax.bitcast_convert_type(load(vector) ^ np.uint8(zero), jnp.int8)
        low, none = (
            load(lax.rem(vector, 4)),
            jnp.zeros((self.tile.size, BLOCK), np.uint8),
        )
        q = self.bytes.take(low, 0, _where(vector < 4, 15, low), none)
        q = self.bytes.take(low, -4, _where(vector >= 4, 15, low), q)
        if bits > 4:
            each = bits - 4
            per = 8 // each  # vectors of numbers with bits in one byte
            high, mask = load(4 + lax.div(vector, per)), ((1 << each) - 1) << 4
            for v in range(per):
                own = _where(lax.rem(vector, per) == v, mask, high)
                q = self.bytes.take(high, 4 - v * each, own, q)
        if self.refs.values is not None:
            return self.refs.values[q.astype(jnp.int32)]
        return self.bytes.less(q, zero)


def _where(columns: jax.Array, bits: int, like: jax.Array) -> jax.Array:
    """Returns a mask [rows, 32] uint8, in the shape of `like`: `bits` in the columns
    where `columns` [32] is True, and 0 in the others."""
    mask = jnp.where(columns, np.uint8(bits), np.uint8(0))
    return jnp.broadcast_to(mask[None, :], like.shape)


def _add_block(
    acc: jax.Array,
    refs: _Operands,
    part: _Block,
    block: int,
    at: jax.Array,
    column: jax.Array,
) -> jax.Array:
    """Adds the product of a block of 32 columns to `acc` [rows, input rows]. The scales
    of the matrix are applied, those of the input rows are not.

    Args:
      acc: the sum so far.
      refs: see `_Operands`.
      part: the program's rows of the matrix.
      block: index of the block in the tile.
      at: indices of the input rows in `refs.rows`.
      column: index of the block's first column in the input.
    """
    w, k = part.integers(block), lax.iota(jnp.int32, BLOCK)
    width = min(part.kind.block, BLOCK)
    for begin in range(0, BLOCK, width):
        x = refs.rows[begin // width, at[:, None], (column + k)[None, :]]
        sums = _dot(w, x).astype(jnp.float32)
        index = (block * BLOCK + begin) // part.kind.block
        scale, minimum = part.kind.scale_of(part.number, index)
        acc = acc + sums * scale[:, None]
        if minimum is not None:
            of_rows = refs.sums[at, lax.div(column, BLOCK)]
            acc = acc + of_rows[None, :] * minimum[:, None]
    return acc


def _dot(w: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies [rows, columns] by [t, columns].T, with int32 sums."""
    return lax.dot_general(
        w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
