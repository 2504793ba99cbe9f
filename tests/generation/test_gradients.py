"""Test that gradients of log-probabilities, computed layer by layer, are those of the
pass that computes them chunk by chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.generation import scoring
from stree_jax.models.stack.by_layer import Run, runs_alone, runs_of
from tests.support.families import FAMILIES, random_model
from tests.support.tiny import tiny

ALONE = [name for name, config in FAMILIES.items() if runs_alone(config)]


def test_layers_that_repeat_are_found():
    assert runs_of("abababc") == [Run(0, 2, 3), Run(6, 1, 1)]
    assert runs_of("aaaa") == [Run(0, 1, 4)]
    assert runs_of("abc") == [Run(i, 1, 1) for i in range(3)]
    assert runs_of("xaabaab") == [Run(0, 1, 1), Run(1, 3, 2)]
    assert runs_of("") == []


def both_ways(monkeypatch, function, *args):
    """Returns the results of a function layer by layer, and chunk by chunk."""
    mine = jax.jit(function)(*args)
    monkeypatch.setattr(scoring, "runs_alone", lambda config: False)
    jax.clear_caches()
    return mine, jax.jit(function)(*args)


@pytest.mark.parametrize("name", ALONE)
def test_gradients_are_those_of_the_pass_by_chunks(name, monkeypatch):
    model = random_model(FAMILIES[name], 1)
    tokens = jax.random.randint(jax.random.key(2), (2, 140), 0, 61)
    weights = jax.random.normal(jax.random.key(3), tokens.shape)

    def scored(params):
        own = model.replace(params=params)
        found = stree_jax.token_logprobs(own, tokens, [140, 77])
        return (weights * found).sum(), found

    slopes = jax.grad(scored, has_aux=True)
    (mine, found), (others, same) = both_ways(monkeypatch, slopes, model.params)
    np.testing.assert_allclose(found, same, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
@pytest.mark.parametrize("name", ["mamba2", "qwen3.5", "granite"])
def test_values_beside_a_gradient_have_the_same_bits(name, optimised):
    """A trainer's ratio of new and old probabilities is exactly 1 in the first step."""
    model = random_model(FAMILIES[name], 1)
    tokens = jax.random.randint(jax.random.key(2), (2, 140), 0, 61)

    def scored(params):
        found = stree_jax.token_logprobs(model.replace(params=params), tokens)
        return found.sum(), found

    (_, beside), _ = jax.jit(jax.value_and_grad(scored, has_aux=True))(model.params)
    alone = stree_jax.token_logprobs(model, tokens)
    assert beside.tolist() == alone.tolist()


def test_the_gradient_keeps_the_states_of_one_layer():
    """With all layers on a chunk before the next chunk, it kept those of all layers."""

    def temporary_bytes(layers):
        model = tiny(3, ("mamba",) * layers)
        tokens = jnp.zeros((2, 1024), jnp.int32)

        def total(params):
            return stree_jax.token_logprobs(model.replace(params=params), tokens).sum()

        compiled = jax.jit(jax.grad(total)).lower(model.params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temporary_bytes(12) - temporary_bytes(4)
    streams = 8 * 2 * 1024 * 32 * 4  # layers, texts, tokens, width, bytes
    assert more < 1.5 * streams


def test_only_the_gradients_that_are_wanted_are_computed():
    """The program of the gradient of one parameter has fewer products."""
    model = tiny(3, ("mamba", "mlp") * 2)
    tokens = jnp.zeros((1, 64), jnp.int32)

    def total(some, params):
        own = model.replace(params=params | some)
        return stree_jax.token_logprobs(own, tokens).sum()

    def products(names):
        some = {name: model.params[name] for name in names}
        text = jax.jit(jax.grad(total)).lower(some, model.params).as_text()
        return text.count("dot_general")

    assert products(["norm"]) == 1  # the head's, backwards
    assert products(model.params) > 20
