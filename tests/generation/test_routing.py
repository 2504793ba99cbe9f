"""Experts that rollouts used are returned, and a trainer replays them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, cpu_kernels
from stree_jax.models.stack.network import ExpertsOf
from stree_jax.models.stack.routing import expert_taps
from stree_jax.sampling import sampling_rows
from tests.support.tiny import (
    tiny,
    tiny_attention,
    tiny_delta,
    tiny_gemma4,
    tiny_hybrid,
    tiny_lara,
    tiny_zaya,
)

MOST = 9
MODELS = {
    "lara": lambda: tiny_lara(1),
    "qwen": lambda: tiny_delta(2),
    "lfm2": lambda: tiny_hybrid(3, ("short_conv", "moe", "attention", "moe")),
    "granite": lambda: tiny_attention(4, ("attention", "mlp", "nope", "moe")),
    "gemma4": lambda: tiny_gemma4(5),
    "zaya": lambda: tiny_zaya(6),
}
PROMPTS = np.array([[8, 9, 10, 11, 12], [20, 21, 22, 0, 0]])
LENGTHS = np.array([5, 3])
SAMPLING = sampling_rows([Sampling(0.9, seed=seed) for seed in range(4)])


# As users' programs are: without optimisation, XLA's own loops differ by their lengths.
pytestmark = pytest.mark.usefixtures("optimised")


def rollout(model):
    done = stree_jax.generate_tokens(
        model,
        PROMPTS,
        LENGTHS,
        max_new_tokens=MOST,
        drafter="lookup",
        tree="chain:2",
        sampling=SAMPLING,
        stop_tokens=(),
        limits=[MOST, 6],
        logprobs=0,
        n=2,
        routing=True,
    )
    return done.joined(PROMPTS, LENGTHS)


@cache
def made(name):
    """Returns a model and the texts of its rollout."""
    model = MODELS[name]()
    return model, rollout(model)


@pytest.fixture(params=MODELS)
def model(request):
    return made(request.param)[0]


@pytest.fixture
def texts(request, model):
    return made(request.node.callspec.params["model"])[1]


@jax.jit
def logprobs(model, texts, routing):
    return stree_jax.token_logprobs(
        model, texts.tokens, texts.lengths, sampling=SAMPLING, routing=routing
    )


def reread(model, texts):
    """Returns the experts [B, T, L, k] of one pass over the texts."""
    from stree_jax.models import chain_nodes, forward_tapped, init_state

    batch, T = texts.tokens.shape
    taps = expert_taps(model.config)
    nodes = chain_nodes(batch, T, model.config.conv_taps, length=texts.lengths)
    state = init_state(model.config, batch, T, jnp.float32)
    tapped = forward_tapped(model, state, texts.tokens, nodes, taps=taps)[1]
    return np.stack(tapped, axis=2)


def test_they_are_those_of_a_reread(model, texts):
    places = np.arange(texts.tokens.shape[1])
    read = places < np.asarray(texts.lengths)[:, None] - 1
    routing = np.asarray(texts.routing)
    assert (routing[~read] == -1).all()
    assert (routing[read] == reread(model, texts)[read]).all()


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
def test_a_replay_has_the_rollouts_bits(model, texts):
    found = logprobs(model, texts, texts.routing)
    assert found[texts.output].tolist() == texts.logprobs[texts.output].tolist()
    own = logprobs(model, texts, None)
    assert found.tolist() == own.tolist()


def test_other_experts_give_other_numbers(model, texts):
    """From the planted token on, in its row alone."""
    tap = expert_taps(model.config)[0]
    assert isinstance(tap, ExpertsOf)
    row, place = 1, 4
    used = set(texts.routing[row, place, 0].tolist())
    other = min(set(range(5)) - used)
    planted = texts.routing.at[row, place, 0, 0].set(other)
    mine, own = (np.asarray(logprobs(model, texts, r)) for r in (planted, texts.routing))
    changed = mine != own
    assert changed[row, place + 1 :].any()
    assert not changed[row, : place + 1].any()
    assert not np.delete(changed, row, axis=0).any()


def test_routers_have_a_gradient(model, texts):
    @jax.jit
    def slope(params, routing):
        own = model.replace(params=params)
        return jax.grad(lambda m: logprobs(m, texts, routing).sum(), allow_int=True)(own)

    mine = jax.tree.leaves_with_path(slope(model.params, texts.routing).params)
    own = jax.tree.leaves(slope(model.params, None).params)
    for (path, one), two in zip(mine, own, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6, err_msg=str(path))
    routers = [np.abs(g).max() for p, g in mine if "router" in jax.tree_util.keystr(p)]
    assert routers and max(routers) > 0
