"""Panels of ggml's storage types, whose blocks GGUF files hold.

A row of a matrix consists of blocks of 32 or 256 columns; `ggml-common.h` of llama.cpp
defines their bytes. This module has the types with blocks of 32, `k_quants.py` the
others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stree_jax.models.weights.panels.blocks import fields_of, in_lanes, spread_bits
from stree_jax.models.weights.panels.k_quants import (
    IQ4_VALUES,
    IQ4_XS,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
)
from stree_jax.models.weights.panels.kind import (
    BLOCK,
    Array,
    Field,
    PanelKind,
    Parts,
    Scales,
    widened,
)

MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1


@dataclass(frozen=True)
class Small(PanelKind):
    """Blocks of 32 columns with a scale d, and a minimum m in some types."""

    @property
    def per_tile(self) -> int:
        return self.tile // BLOCK

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        high = 1 if self.bits == 5 else 0
        d, qh, qs = fields_of(
            arrays,
            ("<f2", len(self.fields)),
            ("<u4", high),
            ("<u4", self.bits - high),
        )
        scales = in_lanes(d, self.per_tile)
        words = in_lanes(qs, self.per_tile)
        if self.bits == 8:
            words ^= np.uint32(0x80808080)
        if high:
            vector = spread_bits(in_lanes(qh, self.per_tile))
            words = np.concatenate([words, vector], axis=-2)
        return [scales[..., i, :] for i in range(len(self.fields))], words

    def scales(self, *fields: Array) -> Scales:
        d, *rest = (widened(field) for field in fields)
        return d, rest[0] if rest else None


@dataclass(frozen=True)
class PowersOfTwo(PanelKind):
    """MXFP4: numbers E2M1 times powers of two for each 32 columns."""

    def lanes(self, arrays: Mapping[str, np.ndarray]) -> Parts:
        e, qs = fields_of(arrays, ("u1", 1), ("<u4", 4))
        per_tile = self.tile // BLOCK
        return [in_lanes(e, per_tile)[..., 0, :]], in_lanes(qs, per_tile)

    def scales(self, *fields: Array) -> Scales:
        import jax.numpy as jnp
        from jax import lax

        e = fields[0].astype(jnp.uint32)
        # 2^(e - 128); the first two are subnormal
        small = jnp.where(e == 0, jnp.uint32(0x00200000), jnp.uint32(0x00400000))
        bits = jnp.where(e < 2, small, (e - 1) << 23)
        return lax.bitcast_convert_type(bits, jnp.float32), None


HALVES = Field("float16", 2)
Q4_0 = Small("q4_0", 0, 64, 4, (HALVES,), zero=8)
Q4_1 = Small("q4_1", 1, 64, 4, (HALVES, HALVES))
Q5_0 = Small("q5_0", 2, 64, 5, (HALVES,), zero=16)
Q5_1 = Small("q5_1", 3, 64, 5, (HALVES, HALVES))
Q8_0 = Small("q8_0", 4, 64, 8, (HALVES,), zero=128)
IQ4_NL = Small(
    "iq4_nl", 8, 64, 4, (HALVES,), zero=128, values=tuple(v + 128 for v in IQ4_VALUES)
)
MXFP4 = PowersOfTwo(
    "mxfp4",
    10,
    128,
    4,
    (Field("uint8", 4),),
    zero=12,
    values=tuple(12 + sign * v for sign in (1, -1) for v in MXFP4_VALUES),
)
GGML = (
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
)
