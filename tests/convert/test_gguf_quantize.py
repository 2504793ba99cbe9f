"""Test the encoders of ggml's types, with the decoders of the `gguf` package."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from stree_jax.convert import CheckpointError
from stree_jax.convert.tensors import gguf_quantize
from stree_jax.convert.tensors.gguf_quantize import BY_NAME, ENCODERS, encoded

QUANTIZED = ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K")
# Root mean square errors of llama.cpp 0.3.36 on `normal()`, relative to the numbers'
# (`python -m tests.gguf_export_peers` measures them).
LLAMA_CPP = {"Q8_0": 0.00535, "Q4_0": 0.08586, "Q5_0": 0.04266, "Q4_K": 0.07137}
LLAMA_CPP |= {"Q6_K": 0.01774}


def normal(rows=64, columns=1024):
    return np.random.default_rng(0).standard_normal((rows, columns), np.float32)


def decoded(data, kind, shape):
    numbered = gguf.GGMLQuantizationType(BY_NAME[kind].number)
    return gguf.quants.dequantize(data.reshape(-1), numbered).reshape(shape)


def error(x, kind):
    """Returns the root mean square error relative to the numbers'."""
    back = decoded(encoded("t", x, BY_NAME[kind]), kind, x.shape)
    return np.sqrt(((back - x) ** 2).mean() / (x**2).mean())


@pytest.mark.parametrize("kind", QUANTIZED)
def test_errors_are_as_small_as_those_of_llama_cpp(kind):
    found = error(normal(), kind)
    assert 0.5 * LLAMA_CPP[kind] < found < 1.02 * LLAMA_CPP[kind]


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("factor", [1e-2, 1e3])
def test_errors_do_not_depend_on_the_scale(kind, factor):
    x = normal(4)
    assert error(x * np.float32(factor), kind) == pytest.approx(error(x, kind), 0.02)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("case", ["zeros", "one", "positive", "negative", "outlier"])
def test_unusual_blocks(kind, case):
    """Errors stay below a step of the block's largest number."""
    x = normal(2)
    match case:
        case "zeros":
            x[:] = 0
        case "one":
            x[:] = 0
            x[:, 5] = -3
        case "positive":
            x = np.abs(x) + 5
        case "negative":
            x = -np.abs(x) - 5
        case "outlier":
            x[:, ::256] = 50
    back = decoded(encoded("t", x, BY_NAME[kind]), kind, x.shape)
    steps = {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_K": 7.5, "Q6_K": 31}[kind]
    assert np.abs(back - x).max() <= 1.02 * np.abs(x).max() / steps


@pytest.mark.parametrize("kind", QUANTIZED)
def test_numbers_of_a_file_are_found_again(kind):
    """Every number at the place of its own code: encoding what was decoded changes
    little, while exchanged places would change everything."""
    x = normal(8)
    once = decoded(encoded("t", x, BY_NAME[kind]), kind, x.shape)
    twice = decoded(encoded("t", once, BY_NAME[kind]), kind, x.shape)
    assert np.abs(twice - once).max() <= 0.2 * np.abs(x - once).max()


def test_plain_numbers_are_rounded_to_nearest():
    x = normal(2)
    x[0, :3] = np.nan, np.inf, -np.inf
    assert encoded("t", x, BY_NAME["F32"]).tobytes() == x.tobytes()
    assert (
        encoded("t", x, BY_NAME["BF16"]).tobytes()
        == x.astype(ml_dtypes.bfloat16).tobytes()
    )
    x[0, :3] = 1
    assert encoded("t", x, BY_NAME["F16"]).tobytes() == x.astype(np.float16).tobytes()


@pytest.mark.parametrize("kind", ENCODERS)
def test_pieces_give_the_same_bytes(kind, monkeypatch):
    x = normal(4)
    whole = encoded("t", x, BY_NAME[kind])
    monkeypatch.setattr(gguf_quantize, "PIECE", 1024)
    np.testing.assert_array_equal(encoded("t", x, BY_NAME[kind]), whole)


@pytest.mark.parametrize("kind", [*QUANTIZED, "F16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(kind, value):
    x = normal(1)
    x[0, 700] = value
    with pytest.raises(CheckpointError, match=f"w: NaN or infinity cannot be {kind}"):
        encoded("w", x, BY_NAME[kind])


def test_numbers_above_the_largest_are_refused():
    x = np.float32([[1, -70000]])
    with pytest.raises(CheckpointError, match="w: 70000 is above the largest F16"):
        encoded("w", x, BY_NAME["F16"])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("size", [1e9, 3e38])
def test_scales_above_the_largest_are_refused(kind, size):
    x = normal(2)
    x *= np.float32(size) / np.abs(x).max()
    with pytest.raises(CheckpointError, match=f"w: .* is above the largest {kind}"):
        encoded("w", x, BY_NAME[kind])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_numbers_too_small_for_a_scale_are_zero(kind):
    x = normal(2) * np.float32(1e-40)
    assert not decoded(encoded("w", x, BY_NAME[kind]), kind, x.shape).any()
