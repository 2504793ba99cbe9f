"""Test the kernel's norms against float64, and their reproducibility."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.layers.norm import (
    Norm,
    ScaledNorm,
    gated_norm,
    scaled_rms_norm,
    whole_norm,
)
from tests.support.native import built, use

pytestmark = built
EPS = 1e-5
NORM = ScaledNorm(EPS)
CALL = "stree_norm"
SIZES = [1, 3, 15, 16, 17, 64, 131, 768, 2048]


def some(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)


def exact(x, scale, eps=EPS):
    x, scale = (np.asarray(z, np.float64) for z in (x, scale))
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * scale


def tolerance(d):
    """Returns the bound of the relative error.

    Each operation rounds by at most 2^-24: d / 16 squares in each of sixteen sums
    (their error is halved by the root), a root, a quotient and two products.
    """
    return ((d / 16 + 6) / 2 + 5) * 2.0**-24


def run(x, scale):
    return jax.jit(scaled_rms_norm, static_argnums=2)(x, scale, NORM)


def text_of(function, *args):
    return jax.jit(function).lower(*args).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_any_size(dtype):
    rng = np.random.default_rng(0)
    for d in SIZES:
        x, scale = some(rng, 2, 5, d), some(rng, d, dtype=dtype)
        y = run(x, scale)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(
            y, exact(x, scale), rtol=tolerance(d), err_msg=str(d)
        )


def test_rows_of_any_magnitude():
    """The ends of float32's range, a row whose squares underflow, and zeros."""
    rng = np.random.default_rng(1)
    magnitudes = np.float32([1e-30, 1e-6, 1.0, 1e6, 1e17, 0.0])[:, None]
    x, scale = some(rng, 6, 96) * magnitudes, some(rng, 96)
    y = np.asarray(run(x, scale))
    np.testing.assert_allclose(y, exact(x, scale), rtol=tolerance(96))
    assert (y[-1] == 0).all()


def test_nan_stays_in_its_row():
    x = np.ones((4, 40), np.float32)
    x[1, 3], x[2, 39] = np.nan, np.inf
    y = np.asarray(run(jnp.asarray(x), jnp.ones((40,))))
    assert np.isfinite(y).all(axis=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("rows", [2, 16, 700])  # 700: shared by the threads
def test_results_do_not_depend_on_other_rows(rows):
    rng = np.random.default_rng(2)
    x, scale = some(rng, rows, 333), some(rng, 333)
    y = np.asarray(run(x, scale))
    np.testing.assert_array_equal(run(x[::-1], scale)[::-1], y)
    for i in {0, 1, rows // 2, rows - 1}:
        np.testing.assert_array_equal(run(x[i : i + 1], scale)[0], y[i])
        np.testing.assert_array_equal(run(x[i][None, None], scale)[0, 0], y[i])


def test_vmap_adds_rows_to_one_call():
    """If `jax.vmap` maps over the scale, XLA computes the norm."""
    rng = np.random.default_rng(3)
    x, scale = some(rng, 3, 2, 4, 24), some(rng, 24)

    def norm(x, scale):
        return scaled_rms_norm(x, scale, NORM)

    mapped = jax.vmap(norm, (0, None))
    text = text_of(mapped, x, scale)
    assert text.count(f"@{CALL}") == 1 and "6x4x24" in text
    y = run(x, scale)
    np.testing.assert_array_equal(jax.jit(mapped)(x, scale), y)
    middle = jax.jit(jax.vmap(norm, (1, None), 1))(x, scale)
    np.testing.assert_array_equal(middle, y)
    scales = jnp.stack([scale, 2 * scale, 3 * scale])
    both = jax.vmap(norm, (0, 0))
    assert CALL not in text_of(both, x, scales)
    wanted = exact(x, np.asarray(scales)[:, None, None])
    np.testing.assert_allclose(jax.jit(both)(x, scales), wanted, rtol=tolerance(24))


def test_derivatives_come_from_the_definition():
    rng = np.random.default_rng(4)
    x, scale, weight = some(rng, 5, 24), some(rng, 24), some(rng, 5, 24)

    def loss(norm):
        return lambda x, scale: (weight * norm(x, scale)).sum()

    ours = jax.grad(loss(lambda *args: scaled_rms_norm(*args, NORM)), (0, 1))
    wanted = jax.jit(jax.grad(loss(NORM), (0, 1)))(x, scale)
    for derivative, of_definition in zip(jax.jit(ours)(x, scale), wanted, strict=True):
        np.testing.assert_array_equal(derivative, of_definition)


def test_models_use_it_for_whole_rows(monkeypatch):
    rng = np.random.default_rng(5)
    x, z, scale = some(rng, 2, 3, 64), some(rng, 2, 3, 64), some(rng, 64)

    def layer(kind):
        norm = Norm(kind, EPS, jnp.float32)
        params = {"scale": scale} | ({} if kind == "rms" else {"bias": scale})
        return lambda x: norm.apply({"params": params}, x)

    def gated(groups):
        return lambda x: gated_norm(x, z, scale, ScaledNorm(1e-5, groups), True)

    for function in (layer("rms"), layer("layer"), gated(1)):
        assert text_of(function, x).count(f"@{CALL}") == 1
        native = jax.jit(function)(x)
        use(monkeypatch, "off")
        assert CALL not in text_of(function, x)
        np.testing.assert_allclose(native, jax.jit(function)(x), rtol=2e-5, atol=1e-6)
        monkeypatch.undo()
        jax.clear_caches()
    assert CALL not in text_of(gated(2), x)


def test_exported_programs_do_not_use_it():
    x, scale = jnp.ones((3, 8)), jnp.ones((8,))
    exported = jax.export.export(jax.jit(lambda *a: scaled_rms_norm(*a, NORM)))
    assert CALL not in exported(x, scale).mlir_module()


def test_unsupported_arrays_use_xla(monkeypatch):
    x, scale = jnp.ones((2, 8)), jnp.ones((8,))
    assert whole_norm.unsupported(x, scale, None, eps=EPS) is None
    assert whole_norm.unsupported(x[:0], scale, None, eps=EPS)
    for args in ((x[0], scale), (x, scale.astype(jnp.float16))):
        assert whole_norm.unsupported(*args, None, eps=EPS)
        np.testing.assert_array_equal(scaled_rms_norm(*args, NORM), NORM(*args))
        assert CALL not in text_of(lambda *a: scaled_rms_norm(*a, NORM), *args)
    use(monkeypatch, "off")
    assert "switched off" in whole_norm.unsupported(x, scale, None, eps=EPS)
