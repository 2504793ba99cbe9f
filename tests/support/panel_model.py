"""Weights in panels in NumPy: random panels of every kind, and what they stand for.

Written from the description of the layout, and independent of `models.weights.panels`.
"""

from dataclasses import dataclass

import numpy as np

IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
SMALL = 0.01  # of random scales


@dataclass(frozen=True)
class Kind:
    """A kind of panels.

    Attributes:
      number: its number in the kernels.
      tile: columns of a tile.
      bits: bits of a number.
      fields: name, dtype and count of the scales of a tile, for each of 16 rows.
      zero: the integer that a number 0 stands for, negated; or a table.
      span: columns of a scale.
    """

    number: int
    tile: int
    bits: int
    fields: tuple[tuple[str, str, int], ...]
    zero: int | list[int] = 0
    span: int = 32

    @property
    def head(self) -> int:
        return sum(16 * np.dtype(d).itemsize * n for _, d, n in self.fields)

    @property
    def nbytes(self) -> int:
        return self.head + 2 * self.tile * self.bits


D2, M2 = ("d", "<f2", 2), ("m", "<f2", 2)
SIXES = ("six", "u1", 12), ("d", "<f2", 1), ("dmin", "<f2", 1)
S, M = ("s", "<f4", 1), ("m", "<f4", 1)
KINDS = {
    "q4_0": Kind(0, 64, 4, (D2,), 8),
    "q4_1": Kind(1, 64, 4, (D2, M2)),
    "q5_0": Kind(2, 64, 5, (D2,), 16),
    "q5_1": Kind(3, 64, 5, (D2, M2)),
    "q8_0": Kind(4, 64, 8, (D2,), 128),
    "q4_k": Kind(5, 256, 4, SIXES),
    "q5_k": Kind(6, 256, 5, SIXES),
    "q6_k": Kind(7, 256, 6, (("d", "<f4", 1), ("sc", "i1", 16)), 32, 16),
    "iq4_nl": Kind(8, 64, 4, (D2,), IQ4),
    "iq4_xs": Kind(9, 256, 4, (("sc", "i1", 8), ("d", "<f2", 1), ("0", "u1", 2)), IQ4),
    "mxfp4": Kind(10, 128, 4, (("e", "u1", 4),), E2M1),
    "nvfp4": Kind(11, 64, 4, (("d", "<f2", 4),), E2M1, 16),
    "int4_32": Kind(12, 32, 4, (S, M)),
    "int4_64": Kind(13, 64, 4, (S, M)),
    "int4_128": Kind(14, 128, 4, (S, M)),
}


def random_panels(kind: Kind, m: int, k: int, seed: int = 0) -> np.ndarray:
    """Returns panels [P, n, nbytes] of a matrix [m, k]: random bytes, small scales."""
    rng = np.random.default_rng(seed)
    count, tiles = -(-m // 16), k // kind.tile
    panels = rng.integers(0, 256, (count, tiles, kind.nbytes)).astype(np.uint8)
    at = 0
    for name, dtype, n in kind.fields:
        size = 16 * n * np.dtype(dtype).itemsize
        if dtype.startswith("<f"):
            scales = SMALL * rng.standard_normal((count, tiles, 16 * n))
            panels[..., at : at + size] = scales.astype(dtype).view(np.uint8)
        elif name == "e":
            panels[..., at : at + size] = rng.integers(118, 124, (count, tiles, size))
        at += size
    return panels


def fields_of(kind: Kind, panels: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the scales [P, n, count, 16] of each tile as float64 or integers."""
    fields, at = {}, 0
    for name, dtype, n in kind.fields:
        size = 16 * n * np.dtype(dtype).itemsize
        part = np.ascontiguousarray(panels[..., at : at + size]).view(dtype)
        exact = np.float64 if dtype.startswith("<f") else np.int64
        fields[name] = part.reshape(*panels.shape[:2], n, 16).astype(exact)
        at += size
    return fields


def numbers_of(kind: Kind, panels: np.ndarray) -> np.ndarray:
    """Returns the numbers [P, n, blocks, 32, 16] as they are stored."""
    data = panels[..., kind.head :].reshape(*panels.shape[:2], -1, kind.bits, 16, 4)
    data = data.astype(np.int64)
    out = np.zeros((*data.shape[:3], 32, 16), np.int64)
    for i in range(32):
        if kind.bits == 8:
            out[..., i, :] = data[..., i // 4, :, i % 4]
            continue
        low = data[..., i % 16 // 4, :, i % 4]
        out[..., i, :] = low >> 4 if i >= 16 else low & 15
        if kind.bits == 5:
            out[..., i, :] |= (data[..., 4, :, i % 4] >> (i // 4) & 1) << 4
        if kind.bits == 6:
            high = data[..., 4 + i // 16, :, i % 4]
            out[..., i, :] |= (high >> 2 * (i // 4 % 4) & 3) << 4
    return out


def scales_of(kind: Kind, panels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and minima [P, n, spans, 16] float64."""
    f = fields_of(kind, panels)
    if "six" in f:
        q = f["six"]
        low = slice(0, 4), slice(4, 8), slice(8, 12)
        a, b, c = (q[:, :, part] for part in low)
        sc = np.concatenate([a & 63, c & 15 | (a >> 6) << 4], 2)
        mn = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], 2)
        return f["d"] * sc, -f["dmin"] * mn
    if "sc" in f:
        scale = f["d"] * f["sc"]
    elif "e" in f:
        scale = 2.0 ** (f["e"] - 128)
    else:
        scale = f["s" if "s" in f else "d"]
    scale = np.repeat(scale, kind.tile // kind.span // scale.shape[2], 2)
    minimum = f.get("m", np.zeros_like(scale))
    return scale, np.repeat(minimum, scale.shape[2] // minimum.shape[2], 2)


def matrix(kind: Kind, panels: np.ndarray) -> np.ndarray:
    """Returns the matrix [16 P, k] float64."""
    q, (scale, minimum) = numbers_of(kind, panels), scales_of(kind, panels)
    values = np.array(kind.zero)[q] if isinstance(kind.zero, list) else q - kind.zero
    parts = values.reshape(*scale.shape[:3], kind.span, 16)
    w = scale[..., None, :] * parts + minimum[..., None, :]
    return w.transpose(0, 4, 1, 2, 3).reshape(16 * len(panels), -1)


def rounded_rows(x: np.ndarray, planes: int) -> np.ndarray:
    """Returns rows [t, k] as they are rounded by a product, float64."""
    columns = 256 if planes == 2 else 32
    while x.shape[1] % columns:
        columns -= 32
    most = np.float32(32512 if planes == 2 else 127)
    parts = x.astype(np.float32).reshape(len(x), -1, columns)
    largest = np.abs(parts).max(-1, keepdims=True)
    q = np.rint(parts * (most / np.maximum(largest, np.float32(1e-30))))
    return (q.astype(np.float64) * (largest / most)).reshape(x.shape)
