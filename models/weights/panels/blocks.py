"""Rearranges the blocks of ggml's storage types to panels.

Bytes of a file are read as words of four. They are first transposed to [..., 16 rows],
so that all further operations work on long contiguous runs.
"""

from collections.abc import Mapping

import numpy as np

from stree_jax.models.weights.panels.kind import LANES

NIBBLES = np.uint32(0x0F0F0F0F)
# Masks of the low half of each pair of fields, by the size of a field in bits.
LOW_HALVES = {1: 0x55555555, 2: 0x33333333, 4: 0x0F0F0F0F}


def fields_of(
    arrays: Mapping[str, np.ndarray], *dtypes: tuple[str, int]
) -> list[np.ndarray]:
    """Splits the blocks of all rows into their fields.

    Args:
      arrays: "blocks" [m, bytes per row] uint8.
      dtypes: dtype and count of each field, in the order of the file.

    Returns:
      Views [m, blocks, count], one for each field.
    """
    block = np.dtype([(f"f{i}", d, (n,)) for i, (d, n) in enumerate(dtypes)])
    rows = np.ascontiguousarray(arrays["blocks"]).view(block)
    return [rows[name] for name in block.names or ()]


def in_lanes(rows: np.ndarray, per_tile: int = 1) -> np.ndarray:
    """Transposes a field to the order of panels, with zeros for missing rows.

    Args:
      rows: [m, blocks, count].
      per_tile: blocks of a tile.

    Returns:
      [P, blocks / per_tile, per_tile, count, 16].
    """
    m, blocks, count = rows.shape
    whole, rest = divmod(m, LANES)
    shape = whole + (rest > 0), blocks // per_tile, per_tile, count, LANES
    out = np.empty(shape, rows.dtype)
    parts = rows[: whole * LANES].reshape(whole, LANES, *shape[1:4])
    out[:whole] = parts.transpose(0, 2, 3, 4, 1)
    if rest:
        last = rows[whole * LANES :].reshape(rest, *shape[1:4])
        out[whole, ..., :rest] = last.transpose(1, 2, 3, 0)
        out[whole, ..., rest:] = 0
    return out


def nibble_vectors(words: np.ndarray) -> np.ndarray:
    """Packs numbers of 4 bits in the order of blocks.

    Args:
      words: [..., 8, 16] uint32. Word w has numbers 4 w to 4 w + 3 of one block in its
        low nibbles, and those of another block in its high nibbles.

    Returns:
      [2, ..., 4, 16] uint32, the two blocks.
    """
    first, second = words[..., :4, :], words[..., 4:, :]
    out = np.empty((2, *first.shape), np.uint32)
    np.bitwise_and(second, NIBBLES, out=out[0])
    out[0] <<= np.uint32(4)
    out[0] |= first & NIBBLES
    np.right_shift(first, np.uint32(4), out=out[1])
    out[1] &= NIBBLES
    out[1] |= second & ~NIBBLES
    return out


def transposed_bits(words: np.ndarray) -> np.ndarray:
    """Transposes fields of bits between words.

    Args:
      words: [..., n, 16] uint32; n is 4 or 8.

    Returns:
      The same shape. Field v of 8 / n bits in each byte of word b is field b of that
      byte of word v.
    """
    n = words.shape[-2]
    words = words.copy()
    step = 1
    while step < n:
        bits = np.uint32(step * 8 // n)
        pairs = words.reshape(*words.shape[:-2], n // (2 * step), 2, step, LANES)
        even, odd = pairs[..., 0, :, :], pairs[..., 1, :, :]
        swapped = even >> bits
        swapped ^= odd
        swapped &= np.uint32(LOW_HALVES[int(bits)])
        odd ^= swapped
        swapped <<= bits
        even ^= swapped
        step *= 2
    return words


def spread_bits(words: np.ndarray) -> np.ndarray:
    """Moves bit 4 v + i of words uint32 to bit v of byte i, for all v and i."""
    out = np.zeros_like(words)
    for v in range(8):
        nibble = words >> np.uint32(4 * v)
        nibble &= np.uint32(15)
        nibble *= np.uint32(0x00204081)  # copies, each shifted by 7 more
        nibble &= np.uint32(0x01010101)
        nibble <<= np.uint32(v)
        out |= nibble
    return out
