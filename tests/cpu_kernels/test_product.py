"""Test the kernels' products against float64, and their reproducibility."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.weights.int8 import Quantized, quantize, rounded
from stree_jax.models.weights.linear import linear
from tests.support.native import INSTRUCTIONS, built, each_level, use
from tests.support.reference import assert_near

pytestmark = built
ROOT = Path(__file__).parents[2]
ROWS = 64
TOLERANCE = 1e-6  # of float32 sums over k; the largest here is 515
# k and m: less than a step, with a remainder, whole blocks, one column, whole tiles.
SIZES = [(1, 1), (5, 3), (64, 8), (77, 131), (515, 9), (96, 1030), (256, 32)]
# Columns that share an int8 scale, as a fraction of k; or a dtype.
KINDS = ["float32", "bfloat16", "int8", "int8 groups"]


def weight_of(kind, rng, m, k):
    weight = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
    if not kind.startswith("int8"):
        return weight.astype(kind)
    divisors = [n for n in (128, 96, 64, 32, 11, 5, 1) if k % n == 0 and n < k]
    return quantize(weight, divisors[0] if "groups" in kind and divisors else None)


def exact(x, weight):
    """Returns x @ weight.T in float64, with x rounded as in the kernel."""
    if isinstance(weight, Quantized):
        groups = weight.scale.shape[1]
        q, scale = (np.asarray(z, np.float64) for z in rounded(x, groups))
        x = (q.reshape(*scale.shape, -1) * scale[..., None]).reshape(q.shape)
        weight = weight.rows(jnp.arange(len(weight.q)))
    else:
        x = x.astype(weight.dtype)
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_any_size(level, kind, monkeypatch):
    use(monkeypatch, level)
    rng = np.random.default_rng(len(kind))
    cases = [
        (jnp.asarray(rng.standard_normal((t, k)), jnp.float32), k, m)
        for t, (k, m) in zip((3, 7, 16, 5, 64, 2, 33), SIZES, strict=True)
    ]
    weights = [weight_of(kind, rng, m, k) for _, k, m in cases]
    run = jax.jit(lambda xs, ws: [linear(*args) for args in zip(xs, ws, strict=True)])
    ys = run([x for x, _, _ in cases], weights)
    assert "stree_product" in run.lower([x for x, _, _ in cases], weights).as_text()
    for (x, *_), weight, y in zip(cases, weights, ys, strict=True):
        assert y.dtype == jnp.float32
        assert_near(y, exact(x, weight), TOLERANCE)


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_other_rows(level, kind, monkeypatch):
    use(monkeypatch, level)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((ROWS, 805)), jnp.float32)
    weight = weight_of(kind, rng, 35, 805)

    @jax.jit
    def run(x, weight):
        prefixes = [linear(x[:t], weight) for t in range(1, ROWS + 1)]
        alone = [linear(x[t : t + 1], weight) for t in range(ROWS)]
        return prefixes, jnp.concatenate(alone), linear(x[::-1], weight)[::-1]

    prefixes, alone, backward = run(x, weight)
    for y in prefixes:
        np.testing.assert_array_equal(y, alone[: len(y)])
    np.testing.assert_array_equal(backward, alone)


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_more_padded_rows_than_one_product_takes(level, kind, monkeypatch):
    """81 valid of 144 rows have bitwise the same results as without padding."""
    use(monkeypatch, level)
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((9, 16, 520)), jnp.float32)
    weight = weight_of(kind, rng, 37, 520)
    count = np.array([16, 0, 1, 16, 5, 16, 2, 16, 9], np.int32)
    run = jax.jit(lambda x, weight, count: linear(x, weight, valid_count=count))
    y = np.asarray(run(x, weight, jnp.asarray(count)))
    assert "stree_product" in run.lower(x, weight, jnp.asarray(count)).as_text()
    exists = np.arange(16)[None] < count[:, None]
    rows = np.asarray(x)[exists]
    alone = [jax.jit(linear)(rows[i : i + 27], weight) for i in range(0, 81, 27)]
    np.testing.assert_array_equal(y[exists], np.concatenate(alone))


# Long groups are summed by another method for few rows than for many, and in parts.
@each_level
@pytest.mark.parametrize(("k", "group"), [(640, 128), (1160, 580), (1100, None)])
def test_results_of_long_groups_do_not_depend_on_the_number_of_rows(
    level, k, group, monkeypatch
):
    use(monkeypatch, level)
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((64, k)), jnp.float32)
    weight = quantize(jnp.asarray(rng.standard_normal((43, k)), jnp.float32), group)
    run = jax.jit(linear)
    whole = np.asarray(run(x, weight))
    assert_near(whole, exact(x, weight), TOLERANCE)
    for t in (1, 2, 3, 6, 7, 17, 18, 19, 33):
        np.testing.assert_array_equal(run(x[-t:], weight), whole[-t:], f"{t} rows")


def test_int8_results_are_equal_with_vnni_and_amx(monkeypatch):
    if "amx" not in (INSTRUCTIONS or ()):
        pytest.skip("no amx kernels here")
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.standard_normal((20, 640)), jnp.float32)
    weight = quantize(jnp.asarray(rng.standard_normal((50, 640)), jnp.float32), 128)
    by = []
    for level in ("amx", "avx512"):
        use(monkeypatch, level)
        by.append(np.asarray(jax.jit(linear)(x, weight)))
    np.testing.assert_array_equal(*by)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_parts_of_columns(kind):
    """Threads take parts of the columns; here the weight is one part or many."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((9, 640)), jnp.float32)
    weight = weight_of(kind, rng, 1001, 640)
    few = jax.tree.map(lambda z: z[500:507], weight)
    run = jax.jit(linear)
    np.testing.assert_array_equal(run(x, weight)[:, 500:507], run(x, few))


def test_a_product_is_complete_when_it_is_read():
    """The call waits for the last part of another thread."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((48, 256)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((8192, 256)), jnp.float32)
    run = jax.jit(lambda x, weight: 2.0 * linear(x, weight)[:, ::-1])
    wanted = np.array(run(x, weight))
    for i in range(40):  # what memory held before is another result
        x, wanted = -x, -wanted
        np.testing.assert_array_equal(run(x, weight), wanted, f"time {i}")


# Weights that are large enough for AMX, with remainders of rows, steps and columns.
LARGE = [(515, 2041), (800, 1312)]


@pytest.mark.parametrize(("k", "m"), LARGE)
def test_large_weights_in_float32(k, m):
    """Sums of bfloat16 parts are as accurate, and do not depend on other rows."""
    rng = np.random.default_rng(k)
    x = jnp.asarray(rng.standard_normal((ROWS, k)), jnp.float32)
    scales = 10.0 ** rng.integers(-6, 6, (m, 1))  # of any size
    weight = jnp.asarray(scales * rng.standard_normal((m, k)), jnp.float32)
    run = jax.jit(linear)
    whole = np.asarray(run(x, weight))
    assert_near(whole / scales.T, exact(x, weight) / scales.T, TOLERANCE)
    for t in (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63):
        np.testing.assert_array_equal(run(x[-t:], weight), whole[-t:], f"{t} rows")
    twice = run(x[:5], jnp.concatenate([weight[3:], weight]))
    np.testing.assert_array_equal(twice[:, -m:], whole[:5])


def test_small_weights_in_float32_do_not_use_amx(monkeypatch):
    """AMX would be slower, and its results would differ."""
    if "amx" not in (INSTRUCTIONS or ()):
        pytest.skip("no amx kernels here")
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((4, 384)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((2048, 384)), jnp.float32)
    by = {}
    for level in ("amx", "avx512"):
        use(monkeypatch, level)
        by[level] = np.asarray(jax.jit(linear)(x, weight))
    np.testing.assert_array_equal(by["amx"], by["avx512"])


def test_nan_stays_in_its_row_with_a_large_weight():
    x = np.ones((20, 640), np.float32)
    x[1, 3], x[2, 639], x[3] = np.nan, np.inf, 0.0
    weight = np.random.default_rng(3).standard_normal((1700, 640))
    y = np.asarray(jax.jit(linear)(jnp.asarray(x), jnp.asarray(weight, jnp.float32)))
    assert np.isfinite(y).all(axis=1).tolist() == [r not in (1, 2) for r in range(20)]
    assert (y[3] == 0).all()


@each_level
def test_nan_stays_in_its_row(level, monkeypatch):
    use(monkeypatch, level)
    x = np.ones((4, 40), np.float32)
    x[1, 3], x[2, 39], x[3] = np.nan, np.inf, 0.0
    for kind in KINDS:
        weight = weight_of(kind, np.random.default_rng(3), 6, 40)
        y = np.asarray(jax.jit(linear)(jnp.asarray(x), weight))
        assert np.isfinite(y).all(axis=1).tolist() == [True, False, False, True], kind
        assert (y[3] == 0).all()


@each_level
def test_rows_are_rounded_to_the_nearest_bfloat16(level, monkeypatch):
    """Ties go to even, large numbers to infinity; the largest finite one stays
    finite."""
    use(monkeypatch, level)
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F0000, 0x7F7FFFFF]
    x = np.array(bits, np.uint32).view(np.float32)[:, None]
    y = jax.jit(linear)(jnp.asarray(x), jnp.ones((1, 1), jnp.bfloat16))
    wanted = jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(y, wanted)


RAGGED = """
import jax, jax.numpy as jnp
from stree_jax.models.weights.linear import linear

def resident():
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS"))

run = jax.jit(lambda x, w, count: linear(x, w, valid_count=count))
x, w = jnp.ones((64, 64, 4096)), jnp.ones((64, 4096))
for count in (64, 63):
    for _ in range(4):
        run(x, w, jnp.full((64,), count, jnp.int32)).block_until_ready()
    print(resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gathered_rows_take_little_memory():
    """Copies of all 4,032 rows would take 66 MB for each thread that computes them."""
    command = [sys.executable, "-c", RAGGED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = map(int, done.stdout.split())
    assert after - before < 16_000  # kB
