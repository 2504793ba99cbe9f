"""Panels of ggml's storage types with blocks of 256 columns.

Scales of smaller blocks are integers, multiplied by scales d of 256 columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stree_jax.models.weights.panels.blocks import (
    NIBBLES,
    fields_of,
    in_lanes,
    nibble_vectors,
    transposed_bits,
)
from stree_jax.models.weights.panels.kind import (
    LANES,
    Array,
    Field,
    Number,
    PanelKind,
    Parts,
    Scales,
    widened,
)

LARGE = 256  # columns of a block
HALF = Field("float16", 1)
# Values of IQ4_XS and IQ4_NL, `kvalues_iq4nl` of ggml-common.h
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class WithMinima(PanelKind):
    """Q4_K and Q5_K: d * sc * q - dmin * mn, with sc and mn of 6 bits for each 32
    columns in twelve bytes."""

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        high = 8 if self.bits == 5 else 0
        d, sc, qh, qs = fields_of(
            arrays, ("<f2", 2), ("u1", 12), ("<u4", high), ("<u4", 32)
        )
        scales, words = in_lanes(d)[:, :, 0], in_lanes(qs)
        count, tiles = words.shape[:2]
        pairs = nibble_vectors(words.reshape(count, tiles, 4, 8, LANES))
        words = np.empty((count, tiles, 8, self.bits, LANES), np.uint32)
        for i, half in enumerate(pairs):  # blocks 2 p + i
            words[:, :, i::2, :4] = half
        if high:
            words[:, :, :, 4] = transposed_bits(in_lanes(qh)[:, :, 0])
        fields = [in_lanes(sc)[:, :, 0], scales[:, :, :1], scales[:, :, 1:]]
        return fields, words

    def scales(self, *fields: Array) -> Scales:
        import jax.numpy as jnp

        q, d, dmin = fields
        a, b, c = (q[..., i : i + 4] for i in (0, 4, 8))
        sc = jnp.concatenate([a & 63, _joined(a, c & 15)], axis=-1)
        mn = jnp.concatenate([b & 63, _joined(b, c >> 4)], axis=-1)
        return widened(d) * widened(sc), -(widened(dmin) * widened(mn))

    def scale_of(self, number: Number, block: int) -> Scales:
        if block < 4:
            sc, mn = number(0, block) & 63, number(0, block + 4) & 63
        else:
            c = number(0, block + 4)
            sc = _joined(number(0, block - 4), c & 15)
            mn = _joined(number(0, block), c >> 4)
        d, dmin = (widened(number(i, 0)) for i in (1, 2))
        return d * widened(sc), -(dmin * widened(mn))


def _joined(high: Array, low: Array) -> Array:
    """Joins the two high bits of one byte and 4 bits of another."""
    return ((high >> 6) << 4) | low


@dataclass(frozen=True)
class SixBits(PanelKind):
    """Q6_K: d * sc * (q - 32), with sc in int8 for each 16 columns."""

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        ql, qh, sc, d = fields_of(
            arrays, ("<u4", 32), ("<u4", 16), ("i1", 16), ("<f2", 1)
        )
        low, high = in_lanes(ql), in_lanes(qh)
        count, tiles = low.shape[:2]
        # blocks of 32 columns: [two halves of 128, two nibbles, two sets of words]
        words = np.empty((count, tiles, 2, 2, 2, 6, LANES), np.uint32)
        pairs = nibble_vectors(low.reshape(count, tiles, 2, 2, 8, LANES))
        for i, half in enumerate(pairs):
            words[:, :, :, i, :, :4] = half
        bits = transposed_bits(high.reshape(count, tiles, 2, 2, 4, LANES))
        by_block = bits.reshape(count, tiles, 2, 2, 2, 2, LANES)  # [.., vector, block]
        words[..., 4:, :] = by_block.transpose(0, 1, 2, 4, 5, 3, 6)
        return self._fields(d, sc), words.reshape(count, tiles, -1, 6, LANES)

    def _fields(self, d: np.ndarray, sc: np.ndarray) -> list[np.ndarray]:
        return [in_lanes(d)[:, :, 0], in_lanes(sc)[:, :, 0]]

    def scales(self, *fields: Array) -> Scales:
        d, sc = fields
        return d * widened(sc), None


@dataclass(frozen=True)
class ThreeBits(SixBits):
    """Q3_K in panels of Q6_K: d * (sc - 32) * (q - 4), with q of 2 and of 1 bits."""

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        mask, qs, sc, d = fields_of(
            arrays, ("<u4", 8), ("<u4", 16), ("u1", 12), ("<f2", 1)
        )
        low, high = in_lanes(qs), in_lanes(mask)[:, :, 0, None]
        count, tiles = low.shape[:2]
        low = low.reshape(count, tiles, 2, 1, 8, LANES)
        shifts = np.arange(8, dtype=np.uint32)[:, None, None]
        q = (low >> (2 * shifts[:4])) & np.uint32(0x03030303)
        q = q.reshape(count, tiles, 8, 8, LANES)
        q |= ((high >> shifts) & np.uint32(0x01010101)) << np.uint32(2)
        q += np.uint32(0x1C1C1C1C)  # 32 - 4 in each byte
        words = np.empty((count, tiles, 8, 6, LANES), np.uint32)
        words[..., :4, :] = nibble_vectors(q & NIBBLES)[0]
        bits = ((q >> np.uint32(4)) & NIBBLES).reshape(count, tiles, 8, 2, 4, LANES)
        shifts = 2 * shifts[:4, 0]
        np.bitwise_or.reduce(bits << shifts, axis=-2, out=words[..., 4:, :])
        nibbles = np.concatenate([sc[..., :8] & 15, sc[..., :8] >> 4], axis=-1)
        pairs = (sc[..., 8:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
        pairs = pairs.swapaxes(-1, -2).reshape(nibbles.shape)
        scale = (nibbles | (pairs << 4)).view(np.int8) - np.int8(32)
        return self._fields(d, scale), words


@dataclass(frozen=True)
class NonLinear(PanelKind):
    """IQ4_XS: d * sc * values[q], with sc of 6 bits for each 32 columns."""

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        d, high, low, qs = fields_of(
            arrays, ("<f2", 1), ("<u2", 1), ("u1", 4), ("<u4", 32)
        )
        nibbles = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:2], 8)
        pairs = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
        scale = (nibbles | (pairs.astype(np.uint8) << 4)).view(np.int8) - np.int8(32)
        fields = [in_lanes(scale)[:, :, 0], in_lanes(d)[:, :, 0]]
        zeros = np.zeros((*fields[0].shape[:2], 2, LANES), np.uint8)
        return [*fields, zeros], in_lanes(qs)

    def scales(self, *fields: Array) -> Scales:
        sc, d, _ = fields
        return widened(d) * widened(sc), None


_Q6_FIELDS = (Field("float32", 1), Field("int8", 16))
_MIN_FIELDS = (Field("uint8", 12), HALF, HALF)
Q3_K = ThreeBits("q3_k", 7, LARGE, 6, _Q6_FIELDS, zero=32, block=16)
Q4_K = WithMinima("q4_k", 5, LARGE, 4, _MIN_FIELDS)
Q5_K = WithMinima("q5_k", 6, LARGE, 5, _MIN_FIELDS)
Q6_K = SixBits("q6_k", 7, LARGE, 6, _Q6_FIELDS, zero=32, block=16)
IQ4_XS = NonLinear(
    "iq4_xs",
    9,
    LARGE,
    4,
    (Field("int8", 8), HALF, Field("uint8", 2)),  # the last are zeros
    zero=128,
    values=tuple(v + 128 for v in IQ4_VALUES),
)
