"""Experts that rollouts used are returned, and a trainer replays them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, cpu_kernels
from stree_jax.models import chain_nodes, expert_taps, forward_tapped, init_state
from stree_jax.models.mixers.moe import MoEConfig, route
from stree_jax.sampling import sampling_rows
from tests.support.tiny import tiny, tiny_gemma4, tiny_hybrid, tiny_lara, tiny_zaya

# As users' programs are: without optimisation, XLA's own loops differ by their lengths.
pytestmark = pytest.mark.usefixtures("optimised")

MODELS = {
    "lara": lambda: tiny_lara(1),
    "lfm2": lambda: tiny_hybrid(3, ("short_conv", "moe", "attention", "moe")),
    "gemma4": lambda: tiny_gemma4(5),
    "zaya": lambda: tiny_zaya(6),
}
PROMPTS = np.array([[8, 9, 10, 11, 12], [20, 21, 22, 0, 0]])
LENGTHS = np.array([5, 3])
SAMPLING = sampling_rows([Sampling(0.9, seed=seed) for seed in range(4)])


def rollout(model, prompts=PROMPTS, lengths=LENGTHS, **options):
    options = dict(max_new_tokens=9, tree="chain:2", routing=True) | options
    return stree_jax.generate_tokens(
        *(model, prompts, lengths),
        drafter="lookup",
        sampling=SAMPLING,
        stop_tokens=(),
        logprobs=0,
        **options,
    )


@cache
def made(name):
    """Returns a model, its rollout and the joined texts, two of each prompt."""
    model = MODELS[name]()
    done = rollout(model, n=2, limits=[9, 6], keep_past=True)
    return model, done, done.joined(PROMPTS, LENGTHS)


@jax.jit
def logprobs(model, texts, routing):
    return stree_jax.token_logprobs(
        model, texts.tokens, texts.lengths, sampling=SAMPLING, routing=routing
    )


@jax.jit
def reread(model, texts):
    """Returns the experts [B, T, L, k] of one pass over the texts."""
    batch, T = texts.tokens.shape
    nodes = chain_nodes(batch, T, model.config.conv_taps, length=texts.lengths)
    state = init_state(model.config, batch, T, jnp.float32)
    options = dict(taps=expert_taps(model.config))
    tapped = forward_tapped(model, state, texts.tokens, nodes, **options)[1]
    return jnp.stack(tapped, axis=2)


def check(model, texts, first):
    """Asserts that the routing from position `first` on is that of one pass."""
    place = np.arange(texts.tokens.shape[1])[None]
    read = (place >= first) & (place < np.asarray(texts.lengths)[:, None] - 1)
    routing = np.asarray(texts.routing)
    assert (routing[~read] == -1).all()
    assert (routing[read] == np.asarray(reread(model, texts))[read]).all()


@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_a_reread_and_can_be_replayed(name):
    model, _, texts = made(name)
    check(model, texts, 0)
    found = np.asarray(logprobs(model, texts, texts.routing))
    if cpu_kernels.level() is not None:
        assert (found == texts.logprobs)[texts.output].all()
    row, place = 1, 4  # with another expert there
    used = set(texts.routing[row, place, 0].tolist())
    planted = texts.routing.at[row, place, 0, 0].set(min(set(range(5)) - used))
    changed = found != np.asarray(logprobs(model, texts, planted))
    assert changed[row, place + 1 :].any()
    assert not changed[row, : place + 1].any()
    assert not np.delete(changed, row, axis=0).any()


def test_a_past_has_been_read_by_the_call_before():
    model, done, texts = made("lara")
    prompts = texts.tokens, texts.lengths
    options = dict(past=done.past, max_new_tokens=3)
    more = rollout(model, *prompts, **options)
    check(model, more.joined(*prompts), np.asarray(texts.lengths)[:, None] - 1)
    assert rollout(model, *prompts, **options, routing=False).routing is None


def test_a_replay_is_differentiable():
    model, _, texts = made("lara")

    def slope(routing):
        def loss(params):
            return logprobs(model.replace(params=params), texts, routing).sum()

        return jax.tree.leaves_with_path(jax.grad(loss)(model.params))

    own = slope(jnp.full_like(texts.routing, -1))
    for (path, one), (_, two) in zip(slope(texts.routing), own, strict=True):
        np.testing.assert_array_equal(one, two)
        if "router" in jax.tree_util.keystr(path):
            assert np.abs(one).max() > 0


@pytest.mark.parametrize(
    "config",
    [
        MoEConfig(6, 2, 16),
        MoEConfig(6, 2, 16, normalize=False),
        MoEConfig(6, 2, 16, router="sigmoid", groups=2),
    ],
    ids=["softmax", "share", "sigmoid"],
)
def test_given_experts_have_the_weights_of_the_router(config):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    chosen, weight = route(logits, None, config)
    again = route(logits, None, config, chosen.reshape(2, 2, 2)[..., ::-1])
    np.testing.assert_array_equal(again[0], chosen[:, ::-1])
    np.testing.assert_allclose(again[1], weight[:, ::-1], rtol=1e-6)
    given = jnp.full((2, 2, 2), -1).at[0, 1].set(jnp.array([5, 0]))
    mixed, other = route(logits, None, config, given)
    assert mixed[1].tolist() == [5, 0] and other[1].tolist() != weight[1].tolist()
    rest = np.array([0, 2, 3])
    np.testing.assert_array_equal(mixed[rest], chosen[rest])
    np.testing.assert_allclose(other[rest], weight[rest], rtol=1e-6)


WRONG = [
    (np.zeros((1, 3, 2, 2), int), r"^routing: want \(1, 3, 3, 2\) \(texts, tokens, "),
    (np.full((1, 3, 3, 2), 6), r"^routing: 6\.\.6 are not all in -1\.\.5"),
    (np.full((1, 3, 3, 2), 4), "^routing: want different experts for each token$"),
    (np.zeros((1, 3, 3, 2)), "^routing: want integers, got float64$"),
]


@pytest.mark.parametrize(("routing", "message"), WRONG, ids=[m for _, m in WRONG])
def test_a_wrong_routing_is_named(routing, message):
    with pytest.raises(ValueError, match=message):
        stree_jax.token_logprobs(tiny_lara(1), [[8, 9, 10]], routing=routing)


def test_prompts_of_another_width_are_not_joined_with_a_routing():
    done = made("lara")[1]
    with pytest.raises(ValueError, match="^prompts: want 5 tokens per row, .* got 3$"):
        done.joined(PROMPTS[:, :3])


def test_a_model_without_experts_is_named():
    message = "^routing: the model has no experts; leave it out$"
    with pytest.raises(ValueError, match=message):
        rollout(tiny(1))
    with pytest.raises(ValueError, match=message):
        stree_jax.token_logprobs(tiny(1), [[8, 9]], routing=np.zeros((1, 2, 0, 0), int))
