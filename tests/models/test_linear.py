"""Test that products with weights are the same in each platform's form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.weights.experts import expert_at
from stree_jax.models.weights.int8 import (
    MIN_GPU_ROWS,
    int8_product,
    int8_product_cuda,
    quantize,
    stored_int8,
)
from stree_jax.models.weights.linear import expert_product, linear
from stree_jax.models.weights.plain import _product, _skinny_gpu, _skinny_tpu
from tests.support.lowering import lowered
from tests.support.native import INSTRUCTIONS, use


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_small_products_are_padded_on_a_gpu(rows):
    """16-bit products of 1 to 3 rows are padded to 16; float32 ones are not."""
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 24)), rng.standard_normal((40, 24))
    for dtype, padded in (("bfloat16", rows < 4), ("float32", False)):
        args = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
        wanted = _product("tk,mk->tm", *args)
        np.testing.assert_allclose(_skinny_gpu(*args), wanted, rtol=1e-6, atol=1e-6)
        text = lowered(linear, args, "cuda")
        assert (f"tensor<{MIN_GPU_ROWS}x40xf32>" in text) == padded


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_row_is_padded_on_a_tpu(rows, dtype):
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 24)), rng.standard_normal((40, 24))
    args = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
    wanted = _product("tk,mk->tm", *args)
    np.testing.assert_allclose(_skinny_tpu(*args), wanted, rtol=1e-6, atol=1e-6)
    assert "tensor<2x40xf32>" in lowered(linear, args, "tpu")
    assert ("pad" in lowered(linear, args, "tpu")) == (rows == 1)


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("size", [24, 8])
def test_a_gpu_multiplies_int8_as_bfloat16(rows, size):
    """The integer sums are exact, and XLA gets no int8 product."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 24)), jnp.float32)
    weight = quantize(jnp.asarray(rng.standard_normal((40, 24)), jnp.float32), size)
    args = x, weight.q, weight.scale
    wanted = int8_product(*args)
    np.testing.assert_allclose(int8_product_cuda(*args), wanted, rtol=1e-6, atol=1e-6)
    text = lowered(linear, (x, weight), "cuda")
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("xbf16>" in line for line in products)


def test_a_named_kernel_runs_or_raises(monkeypatch):
    x, weight = jnp.ones((1025, 24)), jnp.ones((40, 24))
    with pytest.raises(ValueError, match="linear: unknown implementation 'triton'"):
        linear(x, weight, implementation="triton")
    use(monkeypatch, "off")
    with pytest.raises(ValueError, match="linear: native: the compiled kernels are"):
        linear(x[:1], weight, implementation="native")
    monkeypatch.undo()
    if INSTRUCTIONS is not None:
        with pytest.raises(ValueError, match="native: wants at least one row"):
            linear(x[:0], weight, implementation="native")
        assert "stree_product" in lowered(linear, (x, weight), "cpu")
    assert "stree_product" not in lowered(linear, (x[:0], weight), "cpu")


@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_int8_products_are_those_of_rows_that_are_not_rounded(groups):
    """Rounding has the derivative 0: what is left of it is noise."""
    rng = np.random.default_rng(0)
    x, slope = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 24), (5, 8))
    )
    matrices = jnp.asarray(rng.standard_normal((3, 8, 24)), jnp.float32)
    experts = stored_int8(matrices, 24 // groups)
    whole = jnp.stack([expert_at(experts.stack, e).matrix() for e in range(3)])
    chosen = jnp.asarray([2, 0, 1, 2, 2], jnp.int32)

    def of_one(x):
        return (linear(x, expert_at(experts.stack, 1)) * slope).sum()

    def of_chosen(x):
        return (expert_product(x, chosen, experts) * slope).sum()

    each = jnp.einsum("tm,tmk->tk", slope, whole[chosen])
    for function, wanted in ((of_one, slope @ whole[1]), (of_chosen, each)):
        for found in (jax.grad(function)(x), jax.jit(jax.grad(function))(x)):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_an_int8_table_have_the_scales_of_their_groups():
    table = np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)
    table *= np.repeat([1.0, 10.0, 0.1], 8).astype(np.float32)
    ids = jnp.asarray([[3, 0], [4, 4]])
    rows = quantize(jnp.asarray(table), 8).rows(ids)
    largest = np.abs(table.reshape(5, 3, 8)).max(axis=-1, keepdims=True)
    off = np.abs(np.asarray(rows) - table[np.asarray(ids)]).reshape(2, 2, 3, 8)
    assert (off <= 0.51 * largest[np.asarray(ids)] / 127).all()
