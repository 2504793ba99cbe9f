"""Panels of 4-bit numbers of safetensors files: the same numbers, and products."""

import ml_dtypes
import numpy as np
import pytest

from stree_jax.models.weights.format import Packed
from stree_jax.models.weights.kept import Panels
from stree_jax.models.weights.kept_format import KEPT
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.panels import KINDS
from stree_jax.models.weights.panels.groups import GROUPS
from tests.support.panel_files import dequantized, random_blocks
from tests.support.quantized import e2m1

M, K = 21, 384
E2M1 = np.array([e2m1(code) for code in range(16)])


def matrix_of(scheme, seed=0):
    """Returns a random matrix [M, K] in a scheme, and its exact numbers in float64."""
    random = np.random.default_rng(seed)
    kind = KINDS[scheme]
    numbers = random.integers(0, 16, (M, K)).astype(np.uint8)
    grid = M, K // kind.block
    arrays = {"numbers": numbers}
    if scheme == "mxfp4":
        arrays["scale"] = random.integers(118, 124, grid).astype(np.uint8)
        scale = 2.0 ** (arrays["scale"].astype(np.float64) - 127)
        values = E2M1[numbers]
    elif scheme == "nvfp4":
        e4m3 = random.integers(1, 127, grid).astype(np.uint8)
        scale = e4m3.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        arrays["scale"] = scale.astype(np.float32)
        arrays["factor"] = random.uniform(1e-3, 1e-2, M).astype(np.float32)
        values = E2M1[numbers] * arrays["factor"].astype(np.float64)[:, None]
    else:
        arrays["scale"] = (0.01 * random.standard_normal(grid)).astype(np.float16)
        arrays["zero"] = random.integers(0, 16, grid).astype(np.float32)
        scale = arrays["scale"].astype(np.float64)
        arrays["scale"] = arrays["scale"].astype(np.float32)
        values = numbers - np.repeat(arrays["zero"].astype(np.float64), kind.block, 1)
    exact = values * np.repeat(scale, kind.block, axis=1)
    return Packed(scheme, (M, K), arrays), exact


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.name)
def test_numbers_and_products(kind):
    matrix, exact = matrix_of(kind.name)
    weight = KEPT.keep([matrix])
    assert weight.panels.shape == (2, K // kind.tile, kind.nbytes)
    np.testing.assert_array_equal(weight.matrix(), exact.astype(np.float32))
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    y = linear(x, weight, implementation="xla")
    wanted = x @ exact.T
    assert np.abs(y - wanted).max() < 2e-4 * np.sqrt((wanted**2).mean())


def test_mxfp4_of_a_gguf_file():
    blocks = random_blocks("mxfp4", M, K)
    blocks[:3, 0] = 0, 1, 2  # two subnormal scales and the smallest normal one
    weight = KEPT.keep([Packed("mxfp4", (M, K), {"blocks": blocks})])
    # XLA treats subnormal scales as zero.
    wanted = dequantized("mxfp4", blocks)
    np.testing.assert_allclose(weight.matrix(), wanted, rtol=0, atol=1e-36)


def test_columns_in_the_same_order_are_stacked():
    order = np.random.default_rng(2).permutation(K).astype(np.int32)
    parts = [matrix_of("int4_64", seed) for seed in (0, 1)]
    matrices = [
        Packed(p.scheme, p.shape, {**p.arrays, "columns": order}) for p, _ in parts
    ]
    weight = KEPT.keep(matrices)
    assert isinstance(weight, Panels) and weight.shape == (2 * M, K)
    wanted = np.empty((2 * M, K), np.float32)
    wanted[:, order] = np.concatenate([exact for _, exact in parts])
    np.testing.assert_array_equal(weight.matrix(), wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_scale_is_seen(bad):
    matrix, _ = matrix_of("int4_32")
    matrix.arrays["scale"][5, 1] = bad
    x = np.ones((2, K), np.float32)
    y = np.asarray(linear(x, KEPT.keep([matrix]), implementation="xla"))
    assert not np.isfinite(y[:, 5]).any()
    assert np.isfinite(np.delete(y, 5, axis=1)).all()
