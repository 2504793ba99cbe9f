"""Weights in panels: the same numbers as `gguf` decodes, and products with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.weights.format import Packed
from stree_jax.models.weights.kept import Panels
from stree_jax.models.weights.kept_format import KEPT, KEPT_INT8
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.panels import KINDS
from stree_jax.models.weights.panels.ggml import GGML
from stree_jax.models.weights.panels.kind import LANES, aligned
from stree_jax.models.weights.stack import Stack
from stree_jax.models.weights.weight import take, unit
from tests.support.panel_files import dequantized, random_blocks

M, K = 37, 768
SCHEMES = [kind.name for kind in GGML]


def packed(scheme: str, m: int = M, k: int = K, seed: int = 0) -> Packed:
    return Packed(scheme, (m, k), {"blocks": random_blocks(scheme, m, k, seed)})


def exact(matrix: Packed) -> np.ndarray:
    return dequantized(matrix.scheme, matrix.arrays["blocks"])


def assert_near(y, wanted: np.ndarray, limit: float = 2e-4) -> None:
    """Compares products; the limit is relative to the root mean square."""
    assert y.shape == wanted.shape
    assert np.abs(y - wanted).max() < limit * np.sqrt((wanted**2).mean())


def rows(t: int, k: int = K) -> np.ndarray:
    return np.random.default_rng(t).standard_normal((t, k)).astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_panels_hold_the_numbers_of_the_file(scheme):
    matrix = packed(scheme)
    weight = KEPT.keep([matrix])
    assert weight.shape == (M, K) and weight.panels.shape == KINDS[scheme].panel_shape(
        M, K
    )
    np.testing.assert_array_equal(weight.matrix(), exact(matrix))
    ids = jnp.asarray([[3, M - 1], [-1, 16]])
    np.testing.assert_array_equal(weight.rows(ids), exact(matrix)[np.asarray(ids)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_panels_take_the_place_of_blocks_that_may_be_overwritten(scheme, monkeypatch):
    monkeypatch.setattr("stree_jax.models.weights.panels.kind.PACK_BYTES", 2**14)
    kind, m = KINDS[scheme], 8 * LANES  # several pieces
    blocks = aligned((m, packed(scheme).arrays["blocks"].shape[1]), np.dtype(np.uint8))
    blocks[:] = random_blocks(scheme, m, K)
    before = blocks.copy()
    panels = kind.pack({"blocks": blocks})
    assert not np.shares_memory(panels, blocks) and (blocks == before).all()
    again = kind.pack({"blocks": blocks}, reusable=True)
    np.testing.assert_array_equal(again, panels)
    assert np.shares_memory(again, blocks) == (panels.nbytes == blocks.nbytes)
    # Memory that XLA would have to copy is not used again.
    other = aligned((before.nbytes + 16,), np.dtype(np.uint8))[16:].reshape(
        before.shape
    )
    other[:] = before
    third = kind.pack({"blocks": other}, reusable=True)
    np.testing.assert_array_equal(third, panels)
    assert not np.shares_memory(third, other)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chosen_rows_keep_their_numbers(scheme):
    matrix, ids = packed(scheme), np.asarray([0, 3, 16, 17, M - 1])
    order, factor = np.random.default_rng(0).permutation(K), rows(1, M)[0]
    other = Packed(scheme, (M, K), {**matrix.arrays, "factor": factor})
    for one in (matrix, other.with_columns(order)):
        weight = KEPT.keep([one])
        some = weight.gathered(jnp.asarray(ids))
        assert some.panels.shape == KINDS[scheme].panel_shape(len(ids), K)
        np.testing.assert_array_equal(some.matrix(), weight.matrix()[ids])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("format", "limit"), [(KEPT, 2e-4), (KEPT_INT8, 4e-2)])
def test_the_definition_of_products(scheme, format, limit):
    matrix, x = packed(scheme), rows(5)
    y = linear(x, format.keep([matrix]), implementation="xla")
    wanted = x.astype(np.float64) @ exact(matrix).astype(np.float64).T
    assert_near(y, wanted, limit)


def test_a_stack_of_two_kinds():
    matrices = [packed("q4_0", 32), packed("q4_0", 16, seed=1), packed("q8_0", 20)]
    weight = KEPT.keep(matrices)
    assert isinstance(weight, Stack) and len(weight.parts) == 2
    whole = np.concatenate([exact(matrix) for matrix in matrices])
    assert weight.shape == whole.shape
    np.testing.assert_array_equal(weight.matrix(), whole)
    x = rows(3)
    assert_near(linear(x, weight, implementation="xla"), x @ whole.T)


def test_parts_for_devices():
    matrix = packed("q4_k", 64, 1024)
    weight = KEPT.keep([matrix])
    assert (unit(weight, 0), unit(weight, 1)) == (16, 256)
    some = take(weight, (slice(16, 32), slice(48, 64)), 0)
    np.testing.assert_array_equal(some.matrix(), exact(matrix)[np.r_[16:32, 48:64]])
    some = take(weight, (slice(256, 768),), 1)
    np.testing.assert_array_equal(some.matrix(), exact(matrix)[:, 256:768])
    with pytest.raises(ValueError, match="units of 256"):
        take(weight, (slice(0, 128),), 1)


def test_columns_in_another_order_and_factors():
    order = np.random.default_rng(0).permutation(K)
    factor = rows(1, M)[0]
    matrix = packed("q4_0")
    other = Packed("q4_0", (M, K), {**matrix.arrays, "factor": factor})
    weight = KEPT.keep([other.with_columns(order)])
    assert isinstance(weight, Panels)
    wanted = (exact(matrix) * factor[:, None])[:, order]
    np.testing.assert_allclose(weight.matrix(), wanted, rtol=1e-6)
    x = rows(4)
    assert_near(linear(x, weight, implementation="xla"), x @ wanted.T)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_damaged_scale_is_seen(bad):
    matrix = packed("q4_0")
    matrix.arrays["blocks"][5, :2] = np.asarray([bad], "<f2").view(np.uint8)
    y = np.asarray(linear(rows(2), KEPT.keep([matrix]), implementation="xla"))
    assert not np.isfinite(y[:, 5]).any()
    assert np.isfinite(np.delete(y, 5, axis=1)).all()


def test_a_row_with_nan_stays_visible():
    x = rows(3)
    x[1, 7] = np.nan
    y = np.asarray(linear(x, KEPT.keep([packed("q6_k")]), implementation="xla"))
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_exponents_of_mxfp4():
    blocks = random_blocks("mxfp4", 16, 32 * 256)
    blocks.reshape(16, 256, 17)[:, :, 0] = np.arange(256)
    weight = KEPT.keep([Packed("mxfp4", (16, 32 * 256), {"blocks": blocks})])
    with np.errstate(over="ignore"):
        wanted = dequantized("mxfp4", blocks)
    # XLA may replace subnormal factors by 0
    np.testing.assert_allclose(weight.matrix(), wanted, rtol=0, atol=2e-37)
    normal = np.s_[:, 2 * 32 :]
    np.testing.assert_array_equal(np.asarray(weight.matrix())[normal], wanted[normal])


@pytest.mark.parametrize("format", [KEPT, KEPT_INT8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_rows_that_are_not_rounded(scheme, format):
    """Rounding has the derivative 0: what is left of it is noise."""
    weight, slope = format.keep([packed(scheme)]), rows(3, M)

    def weighted(x):
        return (linear(x, weight) * slope).sum()

    assert_near(jax.grad(weighted)(rows(3)), slope @ exact(packed(scheme)), 1e-5)
