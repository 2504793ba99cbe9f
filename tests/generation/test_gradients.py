"""Test that gradients of log-probabilities, computed layer by layer, are those of the
pass that computes them chunk by chunk."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.generation import scoring
from stree_jax.models import MambaConfig, ModelConfig, MoEConfig
from stree_jax.models.base.derivative import with_derivative
from stree_jax.models.stack import by_layer
from stree_jax.models.stack.by_layer import Run, runs_of, units_of
from stree_jax.sampling import Sampling, sampling_arrays
from tests.support.families import FAMILIES, SIZES, random_model
from tests.support.tiny import REAL, tiny


def test_layers_that_repeat_are_found():
    assert runs_of("abababc") == [Run(0, 2, 3), Run(6, 1, 1)]
    assert runs_of("aaaa") == [Run(0, 1, 4)]
    assert runs_of("abc") == [Run(i, 1, 1) for i in range(3)]
    assert runs_of("xaabaab") == [Run(0, 1, 1), Run(1, 3, 2)]
    assert runs_of("") == []


def test_layers_that_read_others_are_one_unit():
    units = {name: units_of(config) for name, config in FAMILIES.items()}
    assert units["zamba2"] == [0, 1, 2, 3, 4]
    assert units["gemma4"] == [0, 10, 11, 12]  # layer 9 reads layer 3's cache
    assert units["zaya"] == [0, 1, 6]  # each router reads the one before


def both_ways(monkeypatch, function, *args):
    """Returns the results of a function layer by layer, and chunk by chunk."""
    jax.clear_caches()
    mine = jax.jit(function)(*args)
    monkeypatch.setattr(scoring, "_by_layer", scoring._by_chunk)
    jax.clear_caches()
    return mine, jax.jit(function)(*args)


def check_both_ways(monkeypatch, scored, model):
    slopes = jax.grad(scored, has_aux=True)
    (mine, found), (others, same) = both_ways(monkeypatch, slopes, model.params)
    np.testing.assert_allclose(found, same, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))


def check_gradients(monkeypatch, config):
    """Checks the gradient of a weighted sum for texts of two lengths."""
    model = random_model(config, 1)
    tokens = jax.random.randint(jax.random.key(2), (2, 140), 0, 61)
    weights = jax.random.normal(jax.random.key(3), tokens.shape)

    def scored(params):
        own = model.replace(params=params)
        found = stree_jax.token_logprobs(own, tokens, [140, 77])
        return (weights * found).sum(), found

    check_both_ways(monkeypatch, scored, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_pass_by_chunks(name, monkeypatch):
    check_gradients(monkeypatch, FAMILIES[name])


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(
    ("name", "period", "times"), [("zamba2", 4, 2), ("gemma4", 3, 3)]
)
def test_shared_blocks_and_per_layer_inputs_in_a_loop(
    name, period, times, loops, monkeypatch
):
    monkeypatch.setattr(by_layer, "MOST_WEIGHTS", 1e9 if loops else 0)
    layers = FAMILIES[name].layers[:period] * times
    check_gradients(monkeypatch, replace(FAMILIES[name], layers=layers))


@pytest.mark.parametrize("loops", [True, False])
def test_layers_use_the_experts_that_they_are_given(loops, monkeypatch):
    """Mixtures of two sizes that repeat, experts at random, penalties, 17 texts."""
    monkeypatch.setattr(by_layer, "MOST_WEIGHTS", 1e9 if loops else 0)
    config = ModelConfig(
        **SIZES,
        layers=("mamba", "few", "many") * 3,
        mixers=dict(
            mamba=MambaConfig(4, 8, 8),
            few=MoEConfig(4, 1, 16),
            many=MoEConfig(6, 2, 16),
        ),
    )
    model = random_model(config, 1)
    tokens = jax.random.randint(jax.random.key(2), (17, 70), 0, 61)
    routing = jax.random.randint(jax.random.key(3), (17, 70, 6, 2), 0, 3)
    routing = routing.at[:, :, 0::2, 1].set(-1)  # `few` uses one expert
    routing = routing.at[:, :, 1::2, 1].add(3)  # other than the first
    options = dict(
        prompt_lengths=[9] * 17,
        sampling=Sampling(0.8, presence_penalty=0.3),
        routing=routing,
    )

    def scored(params):
        own = model.replace(params=params)
        found = stree_jax.token_logprobs(own, tokens, **options)
        found = jnp.where(jnp.isfinite(found), found, 0)
        return found.sum(), found

    check_both_ways(monkeypatch, scored, model)


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
@pytest.mark.parametrize(
    "name", ["mamba2", "qwen3.5", "granite", "zamba2", "gemma4", "zaya"]
)
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


@pytest.fixture(scope="module")
def scored():
    """Returns a function of a model's parameters, and the parameters."""
    model = tiny(3, ("attention", "mamba"))
    tokens = jnp.asarray([[5, 6, 7, 8, 9]])

    def total(params):
        return stree_jax.token_logprobs(model.replace(params=params), tokens).sum()

    return total, model.params


def test_gradients_of_some_parameters_need_no_jit(scored):
    """Attention lies before all parameters that are differentiated."""
    total, params = scored

    def of_norm(norm):
        return total({**params, "norm": norm})

    wanted = jax.jit(jax.grad(total))(params)["norm"]
    for gradient in (jax.grad(of_norm), jax.jit(jax.grad(of_norm))):
        chex.assert_trees_all_close(
            gradient(params["norm"]), wanted, rtol=1e-5, atol=1e-6
        )
    many = jax.vmap(jax.grad(of_norm))(jax.tree.map(lambda x: x[None], params["norm"]))
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], many), wanted, rtol=1e-5, atol=1e-6
    )


def test_forward_mode_and_second_derivatives(scored):
    total, params = scored
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    step = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)

    def along(params):
        return jax.jvp(total, (params,), (step,))[1]

    gradient = jax.jit(jax.grad(total))
    each = jax.tree.map(lambda g, s: (g * s).sum(), gradient(params), step)
    np.testing.assert_allclose(along(params), sum(jax.tree.leaves(each)), rtol=1e-4)
    forward = jax.jit(lambda p: jax.jvp(jax.grad(total), (p,), (step,))[1])(params)
    backward = jax.jit(jax.grad(along))(params)
    for a, b in zip(jax.tree.leaves(forward), jax.tree.leaves(backward), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(abs(b).max()))


MASKS = {
    "top_k": dict(top_k=20),
    "top_p": dict(top_p=0.9),
    "min_p": dict(min_p=0.2),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_gradient_by_temperature_leaves_out_masked_tokens(name):
    model = tiny(3, ("mamba",))
    tokens = jax.random.randint(jax.random.key(1), (1, 40), 0, REAL)

    @jax.jit
    def total(temperature):
        rows = sampling_arrays(1, temperature=temperature, **MASKS[name])
        found = stree_jax.token_logprobs(model, tokens, sampling=rows)
        return jnp.where(jnp.isfinite(found), found, 0).sum()

    slope = (total(1.001) - total(0.999)) / 0.002
    assert abs(slope) > 1
    np.testing.assert_allclose(jax.grad(total)(1.0), slope, rtol=0.02)
    bend = (jax.grad(total)(1.001) - jax.grad(total)(0.999)) / 0.002
    np.testing.assert_allclose(jax.grad(jax.grad(total))(1.0), bend, rtol=0.05)


def test_a_borrowed_derivative_has_a_derivative():
    rounded = with_derivative(lambda x: jnp.round(x), lambda x: x)
    square = jax.grad(lambda x: rounded(x) ** 2)
    assert (square(1.75), jax.grad(square)(1.75)) == (4, 2)


def test_texts_may_be_mapped_over():
    """Mixtures beside an MLP call a kernel without one of its arguments."""
    model = random_model(FAMILIES["gemma4"], 1)
    tokens = jnp.asarray([[5, 6, 7], [8, 9, 10]])

    @jax.jit
    def each(tokens):
        return jax.vmap(lambda ids: stree_jax.token_logprobs(model, ids[None]))(tokens)

    wanted = stree_jax.token_logprobs(model, tokens)
    np.testing.assert_allclose(each(tokens)[:, 0], wanted, rtol=1e-5)
