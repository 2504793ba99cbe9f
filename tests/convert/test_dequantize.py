"""Test stored numbers and scales against fractions, rounded once to the nearest."""

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stree_jax.convert.tensors import dequantize as module
from stree_jax.convert.tensors.compressed_tensors import COMPRESSED, NVFP4_PACKED
from stree_jax.convert.tensors.dequantize import (
    Scheme,
    decode,
    dequantize,
    problem,
    rounded,
)
from stree_jax.convert.tensors.recipe import FP8, INT8, NVFP4
from tests.support.quantized import E4M3, e2m1

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
PACKED = COMPRESSED["pack-quantized", "int", 8]
SEEDS = st.integers(0, 2**32 - 1)


def to_nearest(exact, dtype):
    """Rounds a fraction to 24 or 8 bits, ties to even; only for normal numbers."""
    if exact == 0:
        return 0.0
    bits = 24 if dtype == np.float32 else 8
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - bits + 1)
    return float(round(size / step) * step) * (1 if exact > 0 else -1)


def test_every_byte_of_e2m1():
    """The first number is in the low half."""
    bytes_ = np.arange(256, dtype=np.uint8)[:, None]
    wanted = [[e2m1(byte % 16), e2m1(byte // 16)] for byte in range(256)]
    np.testing.assert_array_equal(decode("U8", bytes_), wanted)


def test_every_byte_of_e4m3():
    """One sign bit, four exponent bits (bias 7), three mantissa bits; no infinity."""
    stored = np.arange(256, dtype=np.uint8).view(E4M3)[:, None]
    for byte, got in enumerate(decode("F8_E4M3", stored)[:, 0]):
        exponent, mantissa = byte >> 3 & 15, (byte & 7) / 8
        if byte & 127 == 127:
            assert np.isnan(got)
            continue
        size = (mantissa if exponent == 0 else 1 + mantissa) * 2.0 ** max(exponent, 1)
        assert got == (-size if byte >> 7 else size) / 2**7


@given(SEEDS)
def test_int8_in_int32(seed):
    numbers = np.random.default_rng(seed).integers(-128, 128, (3, 8))
    words = sum((numbers[:, i::4] + 128) << 8 * i for i in range(4))
    stored = words.astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(decode("I32", stored), numbers)


@given(st.integers(1, 2**31), st.integers(-60, 60), st.integers(-3, 3), st.booleans())
def test_rounded_once(bits, exponent, off, negative):
    """Also near ties of bfloat16, where going through float32 would round twice."""
    number = float(bits) * 2.0**exponent
    number *= 1 + off * 2.0**-45
    number = -number if negative else number
    for dtype in DTYPES.values():
        got = rounded(np.array([number]), dtype)
        assert got.dtype == dtype
        assert float(got[0]) == to_nearest(Fraction(number), dtype)


def test_rounded_at_the_ends():
    tie = 1 + 2.0**-8
    numbers = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, 0, -0.0, np.nan, 1e39])
    got = rounded(numbers, DTYPES["bfloat16"]).astype(np.float64)
    np.testing.assert_array_equal(got, [1, 1 + 2.0**-7, 1, 0, 0, np.nan, np.inf])
    assert np.signbit(got[4])
    assert rounded(np.array([1e-60]), DTYPES["bfloat16"])[0] == 0
    assert rounded(np.array([2.0**-133]), DTYPES["bfloat16"])[0] == 2.0**-133


SCHEMES = {
    "fp8": (FP8, (5, 6)),
    "fp8 by channel": (replace(FP8, block=(1, 0)), (5, 6)),
    "fp8 by block": (replace(FP8, block=(2, 4)), (5, 6)),
    "fp8 by wide block": (replace(FP8, block=(4, 3)), (3, 7)),
    "int8 by group": (replace(INT8, block=(1, 3)), (5, 6)),
    "int8 with zeros": (replace(INT8, block=(1, 2), zero_point="z"), (5, 6)),
    "int8 packed": (replace(PACKED, block=(1, 4), shape=""), (3, 8)),
    "nvfp4": (NVFP4, (3, 32)),
    "nvfp4 by reciprocal": (NVFP4_PACKED, (3, 32)),
}


def random_arrays(scheme, matrix, rng):
    """Returns random numbers and scales of a scheme, and each number as a fraction."""
    grid = scheme.grid(matrix)
    rows, columns = (b or n for b, n in zip(scheme.block, matrix, strict=True))
    codes = rng.integers(0, 256, matrix).astype(np.uint8)
    if scheme.stored == "U8":
        codes &= 15
        arrays = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4}
        numbers = np.vectorize(e2m1)(codes)
        arrays["scale"] = rng.integers(1, 127, grid).astype(np.uint8).view(E4M3)
        arrays["global_scale"] = np.float32(rng.uniform(1e-4, 1e4)).reshape(1)
    else:
        codes[codes & 127 == 127] = 0  # no NaN
        kind = E4M3 if scheme.stored == "F8_E4M3" else np.int8
        arrays = {"weight": codes.view(kind)}
        numbers = codes.view(kind).astype(np.float64)
        arrays["scale"] = rng.uniform(1e-4, 1, grid).astype(np.float32)
    if scheme.stored == "I32":
        words = sum(
            (numbers[:, i::4].astype(np.int64) + 128) << 8 * i for i in range(4)
        )
        arrays["weight"] = words.astype(np.uint32).view(np.int32)
    zeros = np.zeros(grid, np.int8)
    if scheme.zero_point:
        zeros = arrays["zero_point"] = rng.integers(-128, 128, grid).astype(np.int8)
    factor = (
        Fraction(float(arrays["global_scale"][0])) if "global_scale" in arrays else 1
    )
    factor = 1 / factor if scheme.reciprocal else factor

    def exact(i, j):
        at = i // rows, j // columns
        number = Fraction(float(numbers[i, j])) - int(zeros[at])
        return number * Fraction(float(arrays["scale"][at])) * factor

    return arrays, exact


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_dequantize(name, dtype, seed):
    """Every number is the exact value, rounded once."""
    scheme, matrix = SCHEMES[name]
    arrays, exact = random_arrays(scheme, matrix, np.random.default_rng(seed))
    assert problem(scheme, arrays) is None
    got = dequantize(scheme, arrays, dtype)
    assert got.shape == matrix and got.dtype == dtype
    for (i, j), value in np.ndenumerate(got.astype(np.float64)):
        assert value == to_nearest(exact(i, j), dtype), (i, j)


def test_rows_some_at_a_time(monkeypatch):
    """In pieces that are not whole blocks, as for large matrices."""
    scheme, matrix = replace(FP8, block=(128, 128)), (300, 200)
    arrays, _ = random_arrays(scheme, matrix, np.random.default_rng(0))
    whole = dequantize(scheme, arrays, DTYPES["bfloat16"])
    monkeypatch.setattr(module, "PIECE", 7 * 200)
    pieces = dequantize(scheme, arrays, DTYPES["bfloat16"])
    np.testing.assert_array_equal(whole.view(np.uint16), pieces.view(np.uint16))


def test_a_global_scale_folded_into_e4m3_is_another_weight():
    """The exact comparison detects scales that become subnormal."""
    rng = np.random.default_rng(0)
    arrays, _ = random_arrays(NVFP4, (3, 32), rng)
    arrays["global_scale"] = np.array([3e-5], np.float32)
    folded = (arrays["scale"].astype(np.float32) * 3e-5).astype(E4M3)
    one = {**arrays, "scale": folded, "global_scale": np.ones(1, np.float32)}
    right, wrong = (dequantize(NVFP4, a, DTYPES["float32"]) for a in (arrays, one))
    assert np.abs(right - wrong).max() > 0.1 * np.abs(right).max()


def test_bad_scales():
    scheme = Scheme("fp8", "F8_E4M3", (1, 0))
    weight = np.ones((2, 3), E4M3)
    for value, what in ((np.nan, "finite"), (np.inf, "finite"), (-1, "negative")):
        arrays = {"weight": weight, "scale": np.array([[1], [value]], np.float32)}
        part, said = problem(scheme, arrays)
        assert part == "scale" and what in said
    arrays = {"weight": weight, "scale": np.array([[1], [0]], np.float32)}
    assert problem(scheme, arrays) is None  # a row of zeros
    part, said = problem(FP8, {"weight": weight, "scale": np.zeros(1, np.float32)})
    assert part == "scale" and "is 0" in said
