"""Test mixtures of experts in every weight format, with all code paths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import (
    MLPConfig,
    Model,
    ModelConfig,
    MoEConfig,
    cast_params,
    chain_nodes,
    forward_hidden,
    init_params,
    init_state,
)
from stree_jax.models.mixers.moe import weighted_experts
from stree_jax.models.stack.config import named
from stree_jax.models.weights.experts import expert_at
from stree_jax.models.weights.format import Packed
from stree_jax.models.weights.int8_format import INT8
from stree_jax.models.weights.kept_format import KEPT
from stree_jax.models.weights.weight import take, unit
from tests.support.native import use
from tests.support.panel_files import random_blocks

E, WIDTH = 6, 64


@pytest.mark.parametrize("latent", [0, 12])
@pytest.mark.parametrize("tokens", [1, 4])  # the experts' own weights; all experts'
def test_bfloat16_is_near_float32(latent, tokens):
    """XLA:CPU once could not compile it with a latent width (`BF16 x BF16 = F32`)."""
    form = {"gated": False, "activation": "relu2"}
    shared = MLPConfig(16, gated=False, activation="relu2")
    moe = MoEConfig(8, 2, 16, shared, "sigmoid", d_latent=latent, **form)
    config = ModelConfig(
        64,
        64,
        32,
        ("moe",),
        mixers=named(moe=moe),
    )
    wide = init_params(config, jax.random.key(0), jnp.float32)
    text = jnp.arange(tokens, dtype=jnp.int32)[None] + 7

    @jax.jit
    def hidden(params):
        nodes, state = chain_nodes(1, tokens, 1), init_state(config, 1, 1, jnp.float32)
        return forward_hidden(Model(params, config), state, text, nodes)[0]

    rounded = cast_params(config, wide, jnp.bfloat16)
    again = cast_params(
        config, rounded, jnp.float32
    )  # the same weights, other products
    np.testing.assert_allclose(hidden(rounded), hidden(again), atol=0.05)


def experts_in(format, seed):
    """Returns random experts, and their matrices in float64."""
    if format is INT8:
        numbers = np.random.default_rng(seed).standard_normal((E, WIDTH, WIDTH))
        stored = INT8.store(jnp.asarray(numbers, jnp.float32))
    else:
        blocks = {"blocks": random_blocks("q4_0", E * WIDTH, WIDTH, seed)}
        packed = Packed("q4_0", (E * WIDTH, WIDTH), blocks)
        stored = jax.device_put(format.keep([packed], experts=E))
    each = [expert_at(stored.stack, e).matrix() for e in range(E)]
    return stored, np.stack(each).astype(np.float64)


@pytest.mark.parametrize(("format", "limit"), [(INT8, 3e-2), (KEPT, 2e-4)])
@pytest.mark.parametrize("tokens", [1, 9])  # chosen experts; all experts
def test_stored_experts_are_near_exact_ones(format, limit, tokens):
    """The kernels, and the definition for programs without them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    chosen = np.stack([rng.permutation(E)[:2] for _ in x]).astype(np.int32)
    weight = rng.random((tokens, 2)).astype(np.float32)
    (into, first), (down, second) = (experts_in(format, seed) for seed in (1, 2))
    bias = rng.standard_normal((E, WIDTH)).astype(np.float32)
    wanted = np.zeros((tokens, WIDTH))
    for i, j in np.ndindex(tokens, 2):
        e = chosen[i, j]
        h = np.maximum(first[e] @ x[i] + bias[e], 0) ** 2
        wanted[i] += weight[i, j] * (second[e] @ h)
    options = {"gated": False, "activation": "relu2"}
    for compute in (weighted_experts, weighted_experts.definition):
        run = jax.jit(partial(compute, **options))
        error = np.abs(run(x, chosen, weight, into, down, bias) - wanted).max()
        assert error < limit * np.abs(wanted).max()


@pytest.mark.parametrize("format", [INT8, KEPT])
def test_parts_of_experts(format):
    """A device has some rows or columns of every expert."""
    stored, exact = experts_in(format, 3)
    assert (unit(stored, 0), stored.shape) == (1, exact.shape)
    size = unit(stored, 1)
    rows = slice(size, 3 * size), slice(0, size)
    some = take(jax.tree.map(np.asarray, stored), rows, 1)
    assert some.shape == (E, 3 * size, WIDTH)
    wanted = np.concatenate([exact[:, place] for place in rows], axis=1)
    found = [expert_at(some.stack, e).matrix() for e in range(E)]
    np.testing.assert_array_equal(found, wanted)
    assert not stored.divides((slice(0, 1),), 2)


def test_an_expert_that_overflows_changes_only_its_tokens(monkeypatch):
    """All experts run on all tokens here, with weights of 0 for most."""
    use(monkeypatch, "off")
    rng = np.random.default_rng(0)
    x, into, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((8, 16), (E, 12, 16), (E, 16, 12))
    )
    into[0] *= 1e30  # its activation is infinite
    chosen = np.asarray([[1 + t % 5, 1 + (t + 2) % 5] for t in range(8)], np.int32)
    weight = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    wanted = np.zeros((8, 16))
    for t, k in np.ndindex(chosen.shape):
        e = chosen[t, k]
        hidden = np.maximum(into[e].astype(float) @ x[t], 0) ** 2
        wanted[t] += weight[t, k] * (down[e] @ hidden)
    options = dict(gated=False, activation="relu2")
    run = jax.jit(partial(weighted_experts, **options))
    found = run(x, chosen, weight, jnp.asarray(into), jnp.asarray(down))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
