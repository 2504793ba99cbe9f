"""Panels of 4-bit numbers with scales by groups of columns, as safetensors files have
them.

`Scheme.kept` in `convert/tensors/dequantize.py` defines the arrays: "numbers" [m, k]
uint8, "scale" [m, groups], and for integers "zero" [m, groups]. A GGUF file has MXFP4,
too, as "blocks".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stree_jax.models.weights.panels.ggml import fields_of
from stree_jax.models.weights.panels.kind import (
    BLOCK,
    Array,
    Field,
    PanelKind,
    Scales,
    number_bytes,
    widened,
)

Arrays = Mapping[str, np.ndarray]
Parts = tuple[Sequence[np.ndarray], np.ndarray]
BITS = 4
# Twice the numbers of E2M1, plus `E2M1_ZERO` so that none is negative.
E2M1_ZERO = 12
E2M1 = tuple(
    E2M1_ZERO + sign * n for sign in (1, -1) for n in (0, 1, 2, 3, 4, 6, 8, 12)
)
SIXTEEN = 16  # columns that share a scale in NVFP4


def _packed(numbers: np.ndarray) -> np.ndarray:
    """Packs numbers [m, k] uint8 to [m, k / 32, 16]."""
    return number_bytes(numbers.reshape(len(numbers), -1, BLOCK), BITS)


@dataclass(frozen=True)
class Integers(PanelKind):
    """Integers q of 0..15 that stand for scale * (q - zero). Panels store the scale and
    the minimum -scale * zero."""

    def parts(self, arrays: Arrays) -> Parts:
        scale = arrays["scale"].astype(np.float32, copy=False)
        # Exact for scales of up to 19 significant bits, such as float16 and bfloat16.
        minimum = -(scale * arrays["zero"].astype(np.float32, copy=False))
        return [scale[..., None], minimum[..., None]], _packed(arrays["numbers"])

    def scales(self, *fields: Array) -> Scales:
        scale, minimum = fields
        return scale, minimum


@dataclass(frozen=True)
class Nvfp4(PanelKind):
    """E2M1 with a scale in E4M3 for each 16 columns. Half of it is stored, as float16,
    because the numbers are doubled."""

    def parts(self, arrays: Arrays) -> Parts:
        half = np.float32(0.5) * arrays["scale"].astype(np.float32, copy=False)
        per_tile = self.tile // SIXTEEN
        return [half.reshape(len(half), -1, per_tile)], _packed(arrays["numbers"])

    def scales(self, *fields: Array) -> Scales:
        return widened(fields[0]), None


@dataclass(frozen=True)
class Mxfp4(PanelKind):
    """E2M1 with a power of two for each 32 columns: 2**(e - 127), with e as a byte."""

    def parts(self, arrays: Arrays) -> Parts:
        if "blocks" in arrays:
            e, numbers = fields_of(arrays, ("u1", 1), ("u1", BLOCK // 2))
            numbers = np.ascontiguousarray(numbers)
        else:
            e, numbers = arrays["scale"], _packed(arrays["numbers"])
        return [e.reshape(len(e), -1, self.tile // BLOCK)], numbers

    def scales(self, *fields: Array) -> Scales:
        import jax.numpy as jnp
        from jax import lax

        e = fields[0].astype(jnp.uint32)
        # 2**(e - 128), whose first two values are subnormal float32.
        small = jnp.uint32(0x00200000) << jnp.minimum(e, 1)
        bits = jnp.where(e < 2, small, (jnp.maximum(e, 1) - 1) << 23)
        return lax.bitcast_convert_type(bits, jnp.float32), None


def _integers(number: int, group: int) -> Integers:
    fields = (Field("float32", 1), Field("float32", 1))
    return Integers(f"int4_{group}", number, group, BITS, fields, block=group)


GROUPS = (
    Mxfp4("mxfp4", 10, 128, BITS, (Field("uint8", 4),), zero=E2M1_ZERO, values=E2M1),
    Nvfp4(
        "nvfp4",
        11,
        64,
        BITS,
        (Field("float16", 4),),
        zero=E2M1_ZERO,
        values=E2M1,
        block=SIXTEEN,
    ),
    *(_integers(12 + i, group) for i, group in enumerate((32, 64, 128))),
)
