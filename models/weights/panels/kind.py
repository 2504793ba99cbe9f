"""Kinds of panels: matrices that keep a file's 4 to 8 bits per number, in the order in
which products read them.

A panel is 16 consecutive rows of a matrix [m, k]. Along k it is divided into tiles.
A tile holds its scales first and then its numbers, in blocks of 32 columns. A vector of
64 bytes holds bytes of four consecutive columns for each of the 16 rows: byte 4 c + i
belongs to row c. The numbers of a block are

- 4 bits: four vectors; in vector j, the low half of byte 4 c + i is number 4 j + i of
  row c, and the high half is number 16 + 4 j + i.
- 5 bits: these vectors, and one more; its bit v is bit 4 of number 4 v + i.
- 6 bits: these vectors, and two more; bits 2 v and 2 v + 1 of vector g are bits 4 and 5
  of number 4 (4 g + v) + i.
- 8 bits: eight vectors; byte 4 c + i of vector v is number 4 v + i.

A number q stands for scale * (values[q] - zero) + minimum. Letters as in
`models.weights`; P panels, n tiles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a `jax.Array`; jax is imported when something is computed

LANES = 16  # rows of a panel
BLOCK = 32  # columns of a block of numbers
WORD = 4  # columns of a row in a vector
VECTOR = LANES * WORD  # bytes
ALIGNMENT = 64  # bytes; XLA:CPU uses arrays with this alignment without a copy
PACK_BYTES = 2**22  # bytes of a matrix that are rearranged at a time


# Fields, and words of numbers, of a matrix; see `PanelKind.lanes`.
Parts = tuple[Sequence[np.ndarray], np.ndarray]
# Scales, and minima if there are any; see `PanelKind.scales`.
Scales = tuple[Array, Array | None]

Number = Callable[[int, int], Array]  # see `PanelKind.scale_of`


@dataclass(frozen=True)
class Field:
    """Scales of a tile: `count` numbers of a dtype for each row."""

    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        return LANES * self.count * np.dtype(self.dtype).itemsize


class Decoded(NamedTuple):
    """The numbers of a matrix, rows in panels.

    The matrix is scale * q + minimum, with both repeated over the columns of a block.

    Attributes:
      q: [P, 16, n, tile] float32, integers from -128 to 127.
      scale: [P, 16, n, blocks] float32.
      minimum: [P, 16, n, blocks] float32, or None if it is 0.
    """

    q: Array
    scale: Array
    minimum: Array | None

    def matrix(self) -> Array:
        """Returns the numbers [P, 16, k] float32."""
        *lead, tile = self.q.shape
        q = self.q.reshape(*self.scale.shape, -1)
        x = q * self.scale[..., None]
        if self.minimum is not None:
            x = x + self.minimum[..., None]
        return x.reshape(*lead[:-1], lead[-1] * tile)


@dataclass(frozen=True)
class PanelKind(ABC):
    """A way to store matrices in panels.

    Attributes:
      name: the name of the quantization scheme that it keeps.
      number: its number in the compiled kernels (src/panels.h).
      tile: columns of a tile.
      bits: bits of a number.
      fields: the scales of a tile, in order.
      zero: the integer that is subtracted from `values[q]`, or from q if there are no
        `values`, before the scale is applied.
      values: the integer that each stored number q stands for. If None, it is q.
      block: number of columns that share a scale, 16 or a multiple of 32.
    """

    name: str
    number: int
    tile: int
    bits: int
    fields: tuple[Field, ...]
    zero: int = 0
    values: tuple[int, ...] | None = None
    block: int = BLOCK

    @property
    def has_minima(self) -> bool:
        """True if blocks have minima."""
        import jax

        fields = [np.zeros((1, 1, 1, f.count), f.dtype) for f in self.fields]
        return jax.eval_shape(self.scales, *fields)[1] is not None

    @property
    def head(self) -> int:
        """Bytes of a tile's scales."""
        return sum(field.nbytes for field in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return self.head + self.tile * LANES * self.bits // 8

    def keeps(self, shape: Sequence[int]) -> bool:
        """True if a matrix of this shape divides into tiles."""
        return shape[-1] % self.tile == 0

    def panel_shape(self, m: int, k: int) -> tuple[int, int, int]:
        """Returns the shape of the panels of a matrix [m, k]."""
        return -(-m // LANES), k // self.tile, self.nbytes

    def parts(
        self, arrays: Mapping[str, np.ndarray]
    ) -> tuple[Sequence[np.ndarray], np.ndarray]:
        """Takes a matrix apart by rows. A kind implements this or `lanes`.

        Args:
          arrays: the arrays of a `Packed`, with some rows of the matrix.

        Returns:
          The fields, each [m, n, count] in its dtype; and the numbers [m, k / 32, 4 b]
          uint8 with b bits each, in blocks as `number_bytes` returns them.
        """
        raise NotImplementedError

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        """Takes a matrix apart in the order of panels.

        Args:
          arrays: the arrays of a `Packed`, with some rows of the matrix.

        Returns:
          The fields, each [P, n, count, 16] in its dtype or one that converts to it;
          and the words of the numbers [P, n, ..., 16] uint32. Rows past the last one
          have zeros as scales and any numbers.
        """
        fields, numbers = self.parts(arrays)
        words = numbers.view(np.uint32)
        m, tiles = len(words), fields[0].shape[1]
        rest = -m % LANES

        def in_panels(array: np.ndarray) -> np.ndarray:
            whole = np.pad(array.reshape(m, -1), [(0, rest), (0, 0)])
            return whole.reshape(-1, LANES, tiles, whole.shape[1] // tiles)

        return [in_panels(a).transpose(0, 2, 3, 1) for a in fields], in_panels(
            words
        ).transpose(0, 2, 3, 1)

    @abstractmethod
    def scales(self, *fields: Array) -> Scales:
        """Computes the scales and minima [P, 16, n, blocks] float32 of all blocks.

        Args:
          fields: [P, 16, n, count] each.
        """

    def scale_of(self, number: Number, block: int) -> Scales:
        """Computes the scale and minimum of one block, for kernels.

        Args:
          number: function (index of a field, index of a number in the field) that
            returns this number for each row.
          block: index in the tile of a block of `self.block` columns.
        """
        blocks = self.tile // self.block
        fields = (
            number(i, block if field.count == blocks else 0)
            for i, field in enumerate(self.fields)
        )
        return self.scales(*fields)

    def pack(
        self, arrays: Mapping[str, np.ndarray], reusable: bool = False
    ) -> np.ndarray:
        """Rearranges a matrix to panels [P, n, nbytes] uint8.

        Args:
          arrays: the arrays of a `Packed`.
          reusable: True if their memory may be overwritten. The panels then take the
            place of a single array of as many bytes.
        """
        m = len(next(iter(arrays.values())))
        row_bytes = sum(a[:1].nbytes for a in arrays.values())
        step = LANES * max(1, PACK_BYTES // (LANES * max(1, row_bytes)))
        panels: np.ndarray | None = None
        for i in range(0, m, step):
            part = {name: a[i : i + step] for name, a in arrays.items()}
            if reusable:
                part = {name: a.copy() for name, a in part.items()}
            fields, words = self.lanes(part)
            if panels is None:
                shape = (-(-m // LANES), words.shape[1], self.nbytes)
                place = in_place(arrays, shape) if reusable else None
                panels = aligned(shape, np.dtype(np.uint8)) if place is None else place
            self._write(fields, words, panels[i // LANES :][: len(words)])
        assert panels is not None, "a matrix without rows"
        if m % LANES:  # rows past the last one are zero bytes
            numbers = panels[-1, :, self.head :].view(np.uint32)
            numbers.reshape(len(numbers), -1, LANES)[..., m % LANES :] = 0
        return panels

    def _write(
        self, fields: Sequence[np.ndarray], words: np.ndarray, panels: np.ndarray
    ) -> None:
        """Writes the result of `lanes` to panels [P, n, nbytes]."""
        count, tiles = panels.shape[:2]
        at = 0
        for field, array in zip(self.fields, fields, strict=True):
            place = panels[:, :, at : at + field.nbytes].view(field.dtype)
            place.reshape(count, tiles, field.count, LANES)[...] = array
            at += field.nbytes
        place = panels[:, :, at:].view(np.uint32)
        place.reshape(count, *words.shape[1:])[...] = words

    def decode(self, panels: Array) -> Decoded:
        """Decodes panels [P, n, nbytes] uint8; n may be any number of tiles."""
        import jax.numpy as jnp
        from jax import lax

        count, tiles = panels.shape[:2]
        found, at = [], 0
        for field in self.fields:
            part = panels[:, :, at : at + field.nbytes]
            part = part.reshape(count, tiles, field.count, LANES, -1)
            size = np.dtype(field.dtype).itemsize
            part = part[..., 0] if size == 1 else part
            part = lax.bitcast_convert_type(part, np.dtype(field.dtype))
            found.append(part.transpose(0, 3, 1, 2))
            at += field.nbytes
        q = unpacked(panels[:, :, at:], self.bits)
        if self.values is None:
            whole = q.astype(jnp.float32) - self.zero
        else:
            whole = jnp.asarray(self.values, jnp.float32)[q] - self.zero
        return Decoded(whole.reshape(count, LANES, tiles, -1), *self.scales(*found))

    def gathered(self, panels: Array, ids: Array) -> Array:
        """Returns panels that consist of the rows with ids [m] int32. The bytes of a
        row do not change. Rows after the last one, which fill the last panel, are
        zero."""
        import jax.numpy as jnp

        tiles, m = panels.shape[1], len(ids)
        fields = [(f.nbytes, np.dtype(f.dtype).itemsize) for f in self.fields]
        parts, at = [], 0
        for nbytes, size in [*fields, (self.nbytes - self.head, WORD)]:
            part = panels[:, :, at : at + nbytes]
            part = part.reshape(len(panels), tiles, -1, LANES, size)
            own = part[ids // LANES, :, :, ids % LANES]  # [m, n, count, bytes]
            own = jnp.pad(own, [(0, -m % LANES), (0, 0), (0, 0), (0, 0)])
            own = jnp.moveaxis(own.reshape(-1, LANES, *own.shape[1:]), 1, 3)
            parts.append(own.reshape(len(own), tiles, nbytes))
            at += nbytes
        return jnp.concatenate(parts, axis=-1)


def number_bytes(q: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers in the order of a block, for each row.

    Args:
      q: [m, k / 32, 32] uint8, numbers of at most `bits` bits.
      bits: 4, 5, 6 or 8.

    Returns:
      [m, k / 32, 4 bits] uint8.
    """
    if bits == 8:
        return q
    low = (q[..., :16] & 15) | (q[..., 16:] << 4)
    return low if bits == 4 else np.concatenate([low, high_bytes(q >> 4, bits)], -1)


def high_bytes(high: np.ndarray, bits: int) -> np.ndarray:
    """Packs the bits from bit 4 on [m, k / 32, 32] in the order of a block."""
    each = bits - 4
    parts = high.reshape(*high.shape[:2], each, 8 // each, WORD)
    shifts = np.arange(0, 8, each, dtype=np.uint8)[:, None]
    packed = np.bitwise_or.reduce(parts << shifts, axis=3)
    return packed.reshape(*high.shape[:2], each * WORD)


def unpacked(numbers: Array, bits: int) -> Array:
    """Unpacks the numbers of tiles.

    Args:
      numbers: [P, n, bytes] uint8, the tiles without their scales.
      bits: 4, 5, 6 or 8.

    Returns:
      [P, 16, n, blocks, 32] uint8.
    """
    import jax.numpy as jnp

    panels, tiles = numbers.shape[:2]
    vectors = numbers.reshape(panels, tiles, -1, bits, LANES, WORD)
    vectors = vectors.transpose(0, 4, 1, 2, 3, 5)  # [P, 16, n, blocks, bits, 4]
    if bits == 8:
        return vectors.reshape(*vectors.shape[:4], BLOCK)
    low = vectors[..., :4, :]
    q = jnp.concatenate([low & 15, low >> 4], axis=-2)
    if bits > 4:
        each = bits - 4
        shifts = jnp.arange(0, 8, each, dtype=jnp.uint8).reshape(*[1] * 5, -1, 1)
        high = vectors[..., 4:, :][..., None, :] >> shifts
        high = high & np.uint8(2**each - 1)
        q = q | (high.reshape(q.shape) << 4)
    return q.reshape(*q.shape[:4], BLOCK)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that XLA:CPU can use without a copy."""
    count = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(count + ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % ALIGNMENT
    return buffer[begin : begin + count].view(dtype).reshape(shape)


def in_place(
    arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Returns the memory of a single array as an array of bytes that is as if
    `aligned`; None if its size or alignment does not fit."""
    (array, *others) = arrays.values()
    fits = array.nbytes == int(np.prod(shape)) and array.ctypes.data % ALIGNMENT == 0
    flags = array.flags
    if others or not (fits and flags.c_contiguous and flags.writeable):
        return None
    return array.view(np.uint8).reshape(shape)


def widened(x: Any) -> Any:
    """Converts float16 or integers to float32."""
    return x.astype(np.float32)
