"""Test that layers of the same kind are traced once, for any depth."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from stree_jax import models
from stree_jax.models.mixers import attention, kv_cache, mamba2
from tests.models.configs import CONFIGS
from tests.support.reference import assert_near


@pytest.fixture
def traced(monkeypatch):
    """Counts the calls of functions that every mixer or commit calls."""
    jax.clear_caches()
    calls = Counter()

    def counted(name, function):
        def call(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return call

    for where, name in (
        (mamba2, "mixed"),
        (attention, "angles"),
        (mamba2, "replay"),
        (kv_cache, "append_both"),
    ):
        monkeypatch.setattr(where, name, counted(name, getattr(where, name)))
    yield calls
    jax.clear_caches()


def deep(name, layers):
    config = replace(CONFIGS[name], layers=layers)
    params = jax.eval_shape(
        lambda: models.init_params(config, jax.random.key(0), jnp.float32)
    )
    return models.Model(params, config)


def tree_and_commit(model):
    """Runs a forward pass over three nodes and commits two of them."""
    nodes = models.chain_nodes(1, 3, model.config.conv_taps)
    path, two = jnp.arange(2, dtype=jnp.int32)[None], jnp.full(1, 2, jnp.int32)
    start = models.init_state(model.config, 1, 128, jnp.float32)
    tokens = jnp.zeros((1, 3), jnp.int32)
    hidden, records, _ = models.forward_hidden(model, start, tokens, nodes)
    return hidden, models.commit(start, records, path, two)


@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [
        ("mamba2 hybrid", ("mamba", "attention", "mlp"), 1),
        ("two mixers a layer", ("mamba+attention", "moe", "mamba+shared"), 2),
    ],
)
def test_layers_of_a_kind_are_traced_once(traced, name, layers, kinds):
    """`kinds` cover all mixers."""
    model = deep(name, 4 * layers)
    traced.clear()  # of making parameters, where every layer is another
    jax.eval_shape(tree_and_commit, model)
    passes = {"mixed": kinds, "angles": kinds}
    assert traced == passes | {"replay": 1, "append_both": 1}


def test_results_are_the_same_without_jit():
    """`jax.disable_jit` runs every layer."""
    name, kinds = "two mixers a layer", ("mamba+attention", "moe", "mamba+shared")
    config = replace(CONFIGS[name], layers=2 * kinds)
    params = models.init_params(config, jax.random.key(0), jnp.float32)
    model = models.Model(params, config)
    hidden, after = jax.jit(tree_and_commit)(model)
    with jax.disable_jit():
        again, same = tree_and_commit(model)
    assert_near(hidden, again, 1e-4)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(same), strict=True):
        assert_near(a, b, 1e-4)
