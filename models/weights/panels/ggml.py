"""Panels of ggml's storage types, whose blocks GGUF files hold.

A row of a matrix consists of blocks of 32 or 256 columns; `ggml-common.h` of llama.cpp
defines their bytes. Scales are float16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models.weights.panels.kind import (
    BLOCK,
    Field,
    PanelKind,
    number_bytes,
    widened,
)

Arrays = Mapping[str, np.ndarray]
Parts = tuple[Sequence[np.ndarray], np.ndarray]
Scales = tuple[jax.Array, jax.Array | None]
HALF = Field("float16", 1)
LARGE = 256  # columns of a block of the K-quants


def fields_of(arrays: Arrays, *dtypes: tuple[str, int]) -> list[np.ndarray]:
    """Splits the blocks of all rows into their fields.

    Args:
      arrays: "blocks" [m, bytes per row] uint8.
      dtypes: dtype and count of each field, in the order of the file.

    Returns:
      [m, blocks, count] for each field.
    """
    block = np.dtype([(f"f{i}", d, (n,)) for i, (d, n) in enumerate(dtypes)])
    rows = np.ascontiguousarray(arrays["blocks"]).view(block)
    return [rows[name] for name in block.names or ()]


@dataclass(frozen=True)
class Small(PanelKind):
    """Blocks of 32 columns with a scale d, and a minimum m in some types."""

    has_minimum: bool = False

    def parts(self, arrays: Arrays) -> Parts:
        count = 1 + self.has_minimum
        bytes_of = {4: (0, 16), 5: (4, 16), 8: (0, 32)}[self.bits]
        d, high, low = fields_of(
            arrays, ("<f2", count), ("u1", bytes_of[0]), ("u1", bytes_of[1])
        )
        per_tile = self.tile // BLOCK
        fields = [
            np.ascontiguousarray(d[..., i]).reshape(len(d), -1, per_tile)
            for i in range(count)
        ]
        if self.bits == 8:
            return fields, low ^ np.uint8(128)
        if self.bits == 4:
            return fields, np.ascontiguousarray(low)
        bits = np.unpackbits(high, axis=-1, bitorder="little")
        q = np.concatenate([low & 15, low >> 4], axis=-1) | (bits << 4)
        return fields, number_bytes(q, 5)

    def scales(self, *fields: jax.Array) -> Scales:
        d, *rest = (widened(field) for field in fields)
        return d, rest[0] if rest else None


@dataclass(frozen=True)
class WithMinima(PanelKind):
    """Q4_K and Q5_K: d * sc * q - dmin * mn, with sc and mn of 6 bits for each 32
    columns in twelve bytes."""

    def parts(self, arrays: Arrays) -> Parts:
        high = 32 if self.bits == 5 else 0
        d, sc, qh, qs = fields_of(
            arrays, ("<f2", 2), ("u1", 12), ("u1", high), ("u1", 128)
        )
        m, blocks = qs.shape[:2]
        pairs = qs.reshape(m, blocks, 4, 1, BLOCK)
        q = np.concatenate([pairs & 15, pairs >> 4], axis=3).reshape(m, -1, BLOCK)
        if high:
            shifts = np.arange(8, dtype=np.uint8)[:, None]
            bits = (qh[:, :, None] >> shifts) & 1
            q = q | (bits.reshape(q.shape) << 4)
        return [sc, d[..., :1], d[..., 1:]], number_bytes(q, self.bits)

    def scales(self, *fields: jax.Array) -> Scales:
        q, d, dmin = fields
        a, b, c = (q[..., i : i + 4] for i in (0, 4, 8))
        sc = jnp.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
        mn = jnp.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
        return widened(d) * widened(sc), -(widened(dmin) * widened(mn))


@dataclass(frozen=True)
class SixBits(PanelKind):
    """Q6_K: d * sc * (q - 32), with sc in int8 for each 16 columns."""

    def parts(self, arrays: Arrays) -> Parts:
        ql, qh, sc, d = fields_of(
            arrays, ("u1", 128), ("u1", 64), ("i1", 16), ("<f2", 1)
        )
        m, blocks = ql.shape[:2]
        low = ql.reshape(m, blocks, 2, 1, 64)
        low = np.concatenate([low & 15, low >> 4], axis=3).reshape(m, -1, BLOCK)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        high = (qh.reshape(m, blocks, 2, 1, BLOCK) >> shifts) & 3
        q = low | (high.reshape(low.shape) << 4)
        return [d.astype(np.float32), sc], number_bytes(q, 6)

    def scales(self, *fields: jax.Array) -> Scales:
        d, sc = fields
        return d * widened(sc), None


Q4_0 = Small("q4_0", 0, 64, 4, (Field("float16", 2),), zero=8)
Q8_0 = Small("q8_0", 4, 64, 8, (Field("float16", 2),), zero=128)
Q4_K = WithMinima("q4_k", 5, LARGE, 4, (Field("uint8", 12), HALF, HALF))
Q6_K = SixBits(
    "q6_k", 7, LARGE, 6, (Field("float32", 1), Field("int8", 16)), zero=32, block=16
)
GGML = (Q4_0, Q8_0, Q4_K, Q6_K)
