"""Test products with packed weights: every kind against float64, and equal bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.cpu_kernels.library import LEVELS
from tests.support.native import INSTRUCTIONS, built
from tests.support.panel_model import KINDS, matrix, random_panels, rounded_rows

pytestmark = built
COUNTS = (1, 2, 3, 5, 8, 13, 16, 33, 64)  # rows of a product
M = 45  # two panels and most of a third
# Columns: groups of 256, 160, 224 and 192 that are rounded together.
SIZES = {256: 768, 64: 320, 128: 896, 32: 576}
TOLERANCE = 3e-6  # of float32 sums, relative to the sums of absolute products
BEST = -1 if INSTRUCTIONS is None else LEVELS[INSTRUCTIONS[0]]


def product(kind, panels, x, planes, level=BEST, m=M, counts=()):
    call = jax.ffi.ffi_call(
        "stree_panels", jax.ShapeDtypeStruct((len(x), m), jnp.float32)
    )
    numbers = {"kind": kind.number, "planes": planes, "level": level}
    counts = jnp.asarray(counts, jnp.int32)
    return call(x, panels, counts, **{k: np.int64(v) for k, v in numbers.items()})


def looked_up(kind, panels, ids):
    k = panels.shape[1] * kind.tile
    call = jax.ffi.ffi_call(
        "stree_panel_rows", jax.ShapeDtypeStruct((*ids.shape, k), jnp.float32)
    )
    numbers = {"kind": kind.number, "level": 0}
    return call(panels, ids, **{k: np.int64(v) for k, v in numbers.items()})


def rows(t, k, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((t, k)) * 3, jnp.float32)


@pytest.mark.parametrize("name", KINDS)
def test_products_of_every_kind(name):
    """Results have equal bits with any instructions and any number of rows."""
    kind = KINDS[name]
    k = SIZES[kind.tile]
    panels, x = random_panels(kind, M, k), rows(64, k)
    exact = matrix(kind, panels)[:M]

    @jax.jit
    def run(panels, x):
        whole = [
            [product(kind, panels, x, planes, level) for level in LEVELS.values()]
            for planes in (1, 2)
        ]
        some = [
            [product(kind, panels, x[-t:], planes) for t in COUNTS] for planes in (1, 2)
        ]
        return whole, some

    for planes, levels, some in zip((1, 2), *run(panels, x), strict=True):
        y = np.asarray(levels[0])
        for name, other in zip(LEVELS, levels, strict=True):
            np.testing.assert_array_equal(other, y, name)
        for t, part in zip(COUNTS, some, strict=True):
            np.testing.assert_array_equal(part, y[-t:], f"{t} rows")
        q = rounded_rows(np.asarray(x), planes)
        limit = TOLERANCE * (np.abs(q) @ np.abs(exact).T)
        assert (np.abs(y - q @ exact.T) < limit).all()
    wanted = np.asarray(x, np.float64) @ exact.T
    root = np.sqrt((wanted**2).mean())
    assert np.abs(y - wanted).max() < 2e-4 * root  # of two planes


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table(name):
    kind = KINDS[name]
    panels = random_panels(kind, M, SIZES[kind.tile], seed=1)
    ids = jnp.asarray([[0, 17, 47], [-1, 16, 48]])
    wanted = matrix(kind, panels)[[[0, 17, 47], [0, 16, 47]]]
    y = jax.jit(lambda *a: looked_up(kind, *a))(panels, ids)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("planes", [1, 2])
def test_threads_and_padding_rows(planes):
    """Parts of the panels, and some valid rows, have the bits of the whole."""
    kind = KINDS["q4_k"]
    panels, x = random_panels(kind, 1024, 512), rows(48, 512)
    count = np.array([5, 0, 16], np.int32)

    @jax.jit
    def run(panels, x):
        whole = product(kind, panels, x, planes, m=1024)
        part = product(kind, panels[20:23], x, planes, m=48)
        return whole, part, product(kind, panels, x, planes, m=1024, counts=count)

    whole, part, padded = run(panels, x)
    np.testing.assert_array_equal(part, whole[:, 320:368])
    valid = np.arange(48) % 16 < np.repeat(count, 16)
    np.testing.assert_array_equal(padded[valid], whole[valid])


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "nvfp4"])
def test_unusual_scales(name):
    """Subnormal float16 scales are used; infinite and NaN scales stay visible."""
    kind = KINDS[name]
    k = SIZES[kind.tile]
    panels, x = random_panels(kind, 16, k), np.array(rows(5, k))
    x[2] = 0
    dtype, at = ("<f4", 0) if name == "q6_k" else ("<f2", 192 if name == "q4_k" else 0)
    of_rows = panels[0, 1, at : at + 16 * np.dtype(dtype).itemsize].view(dtype)
    of_rows[5] = 3e-7
    wanted = rounded_rows(x, 2) @ matrix(kind, panels).T
    of_rows[0], of_rows[3] = np.inf, np.nan
    run = jax.jit(
        lambda x: [product(kind, panels, x, 2, n, 16) for n in LEVELS.values()]
    )
    for y in run(jnp.asarray(x)):
        assert not np.isfinite(np.asarray(y)[:, [0, 3]]).any()
        fine = np.delete(y, (0, 3), 1), np.delete(wanted, (0, 3), 1)
        np.testing.assert_allclose(*fine, rtol=1e-4, atol=1e-4)


def test_a_row_that_is_not_finite():
    kind, x = KINDS["q5_1"], np.array(rows(3, 640))
    x[1, 7] = np.inf
    y = np.asarray(product(kind, random_panels(kind, M, 640), jnp.asarray(x), 2))
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()
