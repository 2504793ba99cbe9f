"""Encodes float32 numbers in ggml's storage types: the inverse of `gguf_blocks`.

The scales of the K types minimize the squared error of each block: the scale of a fixed
rounding is a least-squares fit, and the best of several roundings is taken. Layouts are
from ggml's `ggml-common.h`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.gguf_blocks import KINDS, Kind

BY_NAME = {kind.name: kind for kind in KINDS.values()}
PIECE = 2**18  # numbers that are encoded at a time; they stay in the processor's cache
# Roundings that are tried for a block: how many steps its largest number takes, less
# the largest code. Chosen on weights of SmolLM2 and on normal random numbers: further
# or finer steps lower the error by less than 0.5 %.
Q6_STEPS = np.linspace(-3.0, 1.0, 9, dtype=np.float32)
Q4_STEPS = np.linspace(-1.0, 1.0, 11, dtype=np.float32)
Q4_MAX, Q4_SCALE_MAX = 15, 63  # largest code of Q4_K, and of its scales
Q6_MAX, Q6_SCALE_MAX = 32, 128  # codes of Q6_K are from -32 to 31, scales from -128


def encoded(name: str, numbers: np.ndarray, kind: Kind) -> np.ndarray:
    """Returns the bytes of a tensor in a storage type, [bytes] uint8.

    Args:
      name: name of the tensor, for messages.
      numbers: the tensor, float32. Its last axis is a multiple of `kind.block`.
      kind: one of `ENCODERS`.

    Raises:
      CheckpointError: the tensor has numbers that the type cannot hold.
    """
    flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
    encode, out = ENCODERS[kind.name], np.empty(kind.nbytes(flat.size), np.uint8)

    def one(start: int) -> None:
        piece = flat[start : start + PIECE].reshape(-1, kind.block)
        if kind.name not in EXACT and not np.isfinite(piece).all():
            raise CheckpointError(f"{name}: NaN or infinity cannot be {kind.name}")
        try:
            # Overflow is reported; numbers too small for a scale are 0 with any code.
            with np.errstate(over="ignore", invalid="ignore"):
                data = encode(piece)
        except OverflowError as error:
            top = np.abs(piece).max()
            what = f"{top:g} is above the largest {kind.name}"
            raise CheckpointError(f"{name}: {what} ({error})") from error
        at = kind.nbytes(start)
        out[at : at + kind.nbytes(piece.size)] = data.reshape(-1).view(np.uint8)

    with ThreadPoolExecutor() as pool:  # NumPy releases the lock of the interpreter
        list(pool.map(one, range(0, flat.size, PIECE)))
    return out


def _f16(numbers: np.ndarray) -> np.ndarray:
    half = numbers.astype("<f2")
    if not np.isfinite(half).all():
        raise OverflowError("numbers and scales of 16 bits are at most 65504")
    return half


def _inverse(numbers: np.ndarray) -> np.ndarray:
    """Returns 1 / x, and 0 for 0."""
    zero = numbers == 0
    return np.where(zero, np.float32(0), 1 / np.where(zero, np.float32(1), numbers))


def _joined(*parts: np.ndarray) -> np.ndarray:
    """Returns blocks [n, bytes] from their parts, each [n, ..]."""
    n = len(parts[0])
    each = [np.ascontiguousarray(part).reshape(n, -1).view(np.uint8) for part in parts]
    return np.concatenate(each, axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Packs codes [n, 2, m] below 16: the first m in the low halves of m bytes."""
    return codes[:, 0] | codes[:, 1] << 4


def _q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return _joined(_f16(scale), np.rint(x * _inverse(scale)).astype(np.int8))


def _q4_0(x: np.ndarray) -> np.ndarray:
    """Encodes a scale, the number of largest magnitude / -8, and 4 bits a number."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    scale = largest / np.float32(-8)
    codes = np.clip(x * _inverse(scale) + np.float32(8.5), 0, 15).astype(np.uint8)
    return _joined(_f16(scale), _nibbles(codes.reshape(-1, 2, 16)))


def _q5_0(x: np.ndarray) -> np.ndarray:
    """Encodes the same as `_q4_0` with 5 bits; the fifth bits are in 4 bytes."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    scale = largest / np.float32(-16)
    codes = np.clip(x * _inverse(scale) + np.float32(16.5), 0, 31).astype(np.uint8)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return _joined(_f16(scale), fifth, _nibbles((codes & 15).reshape(-1, 2, 16)))


def _q6_k(x: np.ndarray) -> np.ndarray:
    """Encodes 16 sub-blocks of 16 numbers, each with a scale of 8 bits."""
    n = len(x)
    parts = x.reshape(n, 16, 16)
    scales = _fitted_scales(parts)  # [n, 16]
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    whole = _f16(largest / np.float32(-Q6_SCALE_MAX))
    steps = whole.astype(np.float32)
    eight = np.clip(np.rint(scales * _inverse(steps)), -Q6_SCALE_MAX, 127)
    each = (eight * steps)[..., None]
    codes = np.clip(np.rint(parts * _inverse(each)), -Q6_MAX, Q6_MAX - 1)
    bits = (codes + Q6_MAX).astype(np.uint8).reshape(n, 2, 4, 32)
    low = bits & 15
    # Each half of the block: its numbers 0 to 63 are in low halves of bytes.
    ql = low[:, :, :2] | low[:, :, 2:] << 4
    qh = (bits >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return _joined(ql, np.bitwise_or.reduce(qh, axis=2), eight.astype(np.int8), whole)


def _fitted_scales(x: np.ndarray) -> np.ndarray:
    """Returns the scale s [n, m] of each part of x [n, m, k] for which s * codes is
    nearest to x, among the roundings of `Q6_STEPS`."""
    at = np.abs(x).argmax(2)[..., None]
    largest = np.take_along_axis(x, at, 2)
    inverse = -_inverse(largest)  # the largest number has the code -32
    best = np.zeros(x.shape[:2], np.float32)
    most = np.full(x.shape[:2], -1, np.float32)
    for step in Q6_STEPS:
        codes = np.rint(x * (inverse * (Q6_MAX + step)))
        np.clip(codes, -Q6_MAX, Q6_MAX - 1, out=codes)
        products = np.einsum("nmk,nmk->nm", x, codes)
        squares = np.einsum("nmk,nmk->nm", codes, codes)
        scale = products * _inverse(squares)
        gain = products * scale  # by which the squared error falls
        better = gain > most
        best, most = np.where(better, scale, best), np.where(better, gain, most)
    return best


def _q4_k(x: np.ndarray) -> np.ndarray:
    """Encodes 8 sub-blocks of 32 numbers, each with a scale and a minimum of 6 bits."""
    n = len(x)
    parts = x.reshape(n, 8, 32)
    scales, minima = _fitted_ranges(parts)  # [n, 8]
    wholes, codes_of, each = [], [], []
    for numbers in (scales, minima):
        whole = _f16(numbers.max(1, keepdims=True) / np.float32(Q4_SCALE_MAX))
        steps = whole.astype(np.float32)
        six = np.clip(np.rint(numbers * _inverse(steps)), 0, Q4_SCALE_MAX)
        wholes.append(whole)
        codes_of.append(six.astype(np.uint8))
        each.append((six * steps)[..., None])
    codes = np.rint((parts + each[1]) * _inverse(each[0]))
    bits = np.clip(codes, 0, Q4_MAX).astype(np.uint8).reshape(n, 4, 2, 32)
    nibbles = bits[:, :, 0] | bits[:, :, 1] << 4
    return _joined(*wholes, _six_bits(*codes_of), nibbles)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Packs the scales and minima [n, 8] of Q4_K in 12 bytes: the first four of each in
    six bits of a byte, the others in halves of four bytes, and their upper two bits
    above the first four."""
    upper = [numbers[:, :4] | numbers[:, 4:] >> 4 << 6 for numbers in (scales, minima)]
    halves = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([*upper, halves], axis=1)


def _fitted_ranges(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale s and the minimum m, both [n, p] and not negative, of each part
    of x [n, p, k] for which s * codes - m is nearest to x, among the roundings of
    `Q4_STEPS`."""
    k = np.float32(x.shape[2])
    low = np.minimum(x.min(2), 0)
    width = x.max(2) - low
    above, total = x - low[..., None], x.sum(2)
    best = width / Q4_MAX, -low
    least = np.full(low.shape, np.inf, np.float32)
    for step in Q4_STEPS:
        codes = np.rint(above * (_inverse(width) * (Q4_MAX + step))[..., None])
        np.clip(codes, 0, Q4_MAX, out=codes)
        sums = codes.sum(2)
        squares = np.einsum("npk,npk->np", codes, codes)
        products = np.einsum("npk,npk->np", x, codes)
        # The least-squares line through (code, x), with a minimum that is not negative.
        scale = (k * products - sums * total) * _inverse(k * squares - sums * sums)
        minimum = (scale * sums - total) / k
        through_zero = minimum < 0
        scale = np.where(through_zero, products * _inverse(squares), scale)
        minimum = np.where(through_zero, np.float32(0), minimum)
        apart = scale[..., None] * codes - minimum[..., None] - x
        error = np.einsum("npk,npk->np", apart, apart)
        better = (error < least) & (scale >= 0)
        pair = scale, minimum
        best = (
            np.where(better, pair[0], best[0]),
            np.where(better, pair[1], best[1]),
        )
        least = np.where(better, error, least)
    return best


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype("<f4", copy=False)


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


EXACT = ("F32", "BF16")  # these hold NaN and infinity
# Encoders of blocks [n, numbers] float32, by ggml's name of the type.
ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
