"""Test the kernels' products with the matrices of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.weights.experts import Experts, expert_at
from stree_jax.models.weights.format import Packed
from stree_jax.models.weights.int8_format import INT8
from stree_jax.models.weights.kept_format import KEPT, KEPT_INT8
from stree_jax.models.weights.linear import expert_product, linear
from stree_jax.models.weights.parameters import stack_of
from tests.support.native import built, each_level, use
from tests.support.panel_files import random_blocks

pytestmark = built
E, M, K = 7, 35, 256
KINDS = ["float32", "bfloat16", "int8", "q4_0", "q6_k", "q4_0 rows in int8"]


def experts_of(kind):
    name = kind.split()[0]
    if name in ("q4_0", "q6_k"):
        packed = Packed(name, (E * M, K), {"blocks": random_blocks(name, E * M, K, 0)})
        format = KEPT_INT8 if "int8" in kind else KEPT
        return jax.device_put(format.keep([packed], experts=E))
    numbers = np.random.default_rng(0).standard_normal((E, M, K)).astype(np.float32)
    return INT8.store(numbers) if name == "int8" else jnp.asarray(numbers, name)


def one_of(experts, e):
    """Returns the matrix of one expert as a parameter of a model."""
    if isinstance(experts, Experts):
        return expert_at(experts.stack, e)
    return experts[e]


def choices(t):
    """Chooses experts: one for most rows, some for a few rows, and one for no row."""
    return np.random.default_rng(t).choice(E - 1, t, p=[0.5] + 5 * [0.1])


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_products_of_every_expert(level, kind, monkeypatch):
    """Bit by bit, for one and several results per row, with padding."""
    use(monkeypatch, level)
    experts = experts_of(kind)
    assert experts.shape == (E, M, K)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((64, K)), jnp.float32)
    run = jax.jit(lambda x, w: [linear(x, one_of(w, e)) for e in range(E)])
    every = np.asarray(run(x, experts))
    for n, repeats in ((1, 4), (64, 1), (64, 3), (64, 70)):  # at most 4096 at once
        chosen = choices(n * repeats).astype(np.int32)
        chosen[3] = -1
        y = np.asarray(expert_product(x[:n], chosen, experts, "native"))
        for i in np.flatnonzero(chosen >= 0):
            np.testing.assert_array_equal(y[i], every[chosen[i]][i // repeats])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeats", [1, 3])  # few results: a gather
def test_near_the_definition(kind, repeats):
    experts = experts_of(kind)
    x = np.random.default_rng(2).standard_normal((10, K)).astype(np.float32)
    for n in (2, 10):
        chosen = choices(n * repeats).astype(np.int32)
        native, plain = (
            np.asarray(expert_product(x[:n], chosen, experts, which))
            for which in ("native", "xla")
        )
        assert np.abs(native - plain).max() < 1e-5 * np.abs(plain).max()


def test_runs_in_a_program():
    experts, chosen = experts_of("int8"), jnp.zeros((2,), jnp.int32)
    run = jax.jit(expert_product)
    text = run.lower(jnp.ones((2, K)), chosen, experts).as_text()
    assert "stree_experts_int8" in text
    reason = stack_of(experts).chosen_unsupported(jnp.ones((2, K)), chosen[:0])
    assert reason == "wants arrays that are not empty"
    with pytest.raises(ValueError, match="expert_product: native: wants arrays"):
        expert_product(jnp.ones((2, K)), chosen[:0], experts, "native")
