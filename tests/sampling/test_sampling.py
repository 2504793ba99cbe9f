"""Test that sampled text has the target's distribution, and that mistakes are
detected.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stree_jax import Sampling
from stree_jax.sampling.distribution import (
    Distribution,
    choice_margin,
)
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import check_rows, sampling_arrays, sampling_rows
from tests import distribution


@pytest.fixture(scope="module")
def experiment():
    return distribution.Experiment()


@pytest.mark.parametrize(("rule", "tree"), distribution.RULES)
def test_the_joint_distribution_matches_the_target(experiment, rule, tree):
    assert experiment.p_value(rule, tree) > 0.01


@pytest.mark.parametrize("name", distribution.MISTAKES)
def test_planted_mistakes_are_found(experiment, name):
    assert experiment.p_value_of(distribution.MISTAKES[name]) < 1e-6


def dist_of(sampling, places, V, seen=None):
    """Returns the distribution of B rows at places [B] of their outputs."""
    places = jnp.asarray(places, jnp.int32)
    none = jnp.full((len(places), 1), -1, jnp.int32)
    requests = Requests(places + 1, None, none, None, sampling)
    return Distribution(
        requests, places, None if seen is None else seen.astype(jnp.int32), V
    )


def processed(sampling, logits, seen):
    (batch, Q, V), seen = logits.shape, None if seen is None else seen[:, 0]
    dist = dist_of(sampling, [0] * batch, V, seen)
    return dist.scores(logits, jnp.zeros((1, Q), jnp.int32))


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=1e-30),
    Sampling(top_k=1),
    Sampling(top_k=7, temperature=2.0),
    Sampling(top_k=10_000),
    Sampling(top_p=0.5),
    Sampling(top_p=0.95, top_k=20),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.1),
    Sampling(min_p=0.05, top_p=0.9, top_k=30, temperature=0.7),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7, top_k=5, temperature=1.5),
]


def warped(logits, text, s):
    """Applies transformers' processors in its order to logits [V] after a text [S]."""
    chain = LogitsProcessorList()
    if s.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    chain.append(TemperatureLogitsWarper(max(s.temperature, 1e-20)))
    if s.top_k:
        chain.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        chain.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        chain.append(MinPLogitsWarper(s.min_p))
    z = chain(torch.tensor(text)[None], torch.tensor(logits)[None].double())
    return torch.log_softmax(z[0], dim=-1).numpy()


def test_processed_distributions_match_transformers():
    rng = np.random.default_rng(0)
    V, Q = 50, 3
    rows = sampling_rows(SETTINGS)
    logits = (3 * rng.standard_normal((len(SETTINGS), Q, V))).astype(np.float32)
    text = rng.integers(0, V, (len(SETTINGS), 12))
    seen = np.zeros((len(SETTINGS), 1, V), bool)
    for row, ids in zip(seen[:, 0], text, strict=True):
        row[ids] = True
    seen = np.broadcast_to(seen, logits.shape)
    ours = np.asarray(jax.jit(processed)(rows, logits, jnp.asarray(seen)))
    for b, s in enumerate(SETTINGS):
        for q in range(Q):
            theirs = warped(logits[b, q], text[b], s)
            kept = np.isfinite(theirs)
            assert (np.isfinite(ours[b, q]) == kept).all() or s.temperature == 1e-30
            np.testing.assert_allclose(
                np.exp(ours[b, q]), np.exp(theirs), rtol=1e-4, atol=1e-6
            )


def test_top_k_keeps_all_tied_tokens():
    """All tokens as probable as the k-th are kept."""
    rows = sampling_rows([Sampling(top_k=2), Sampling(top_p=0.5)])
    logits = jnp.asarray([[[0.0, 1.0, 1.0, 1.0, -1.0]]] * 2, jnp.float32)
    kept = np.isfinite(processed(rows, logits, None))[:, 0]
    assert kept.tolist() == [[False, True, True, True, False]] * 2


def test_forbidden_tokens_are_never_chosen():
    logits = jnp.full((len(SETTINGS), 1, 9), -jnp.inf).at[:, :, 3].set(-7.0)
    p = np.exp(processed(sampling_rows(SETTINGS[:11]), logits[:11], None))
    assert (p[:, 0, 3] == 1).all() and p.sum() == 11


MARGINS = [
    # Settings, logits, noise, the chosen token, and the expected margin.
    (Sampling(), [2.0, 1.5, 0.0], [0, 0, 0], 0, 0.5),
    (Sampling(top_k=1), [2.0, 1.9, 0.0], [0, 0, 0], 0, 0.1),
    # The chosen token could drop out of the filter
    (Sampling(top_k=1), [2.0, 1.9, 0.0], [0, -5, 0], 0, 0.1),
    # The next kept token could win
    (Sampling(top_k=2), [2.0, 1.9, 1.7], [0, 0, 5], 0, 0.1),
    (Sampling(top_k=2), [3.0, 1.9, 1.7], [0, 0, 5], 0, 0.2),  # the third could win
    # It could enter the filter and lose
    (Sampling(top_k=2), [3.0, 1.9, 1.7], [0, 0, 0], 0, 1.1),
    (Sampling(min_p=0.5), [0.0, np.log(0.5) - 0.3, -9], [0, 5, 0], 0, 0.3),
    (Sampling(min_p=0.5), [0.0, np.log(0.5) + 0.3, -9], [0, 5, 0], 1, 0.3),
    (Sampling(top_p=0.6), np.log([0.62, 0.28, 0.1]), [0, 9, 0], 0, 0.02),
    (Sampling(top_p=0.85), np.log([0.6, 0.3, 0.1]), [0, 9, 0], 1, 0.25),
    (Sampling(temperature=0, top_k=1), [2.0, 1.9, 0.0], [0, 0, 0], 0, 0.1),
]


@pytest.mark.parametrize(("settings", "logits", "noise", "best", "gap"), MARGINS)
def test_the_margin_includes_the_boundaries_of_filters(
    settings, logits, noise, best, gap
):
    """A change of the logits below the margin cannot change the choice."""
    dist = dist_of(sampling_rows([settings]), [0], 3)
    logits = jnp.asarray(logits, jnp.float32)
    noise = jnp.asarray([noise], jnp.float32)

    @jax.jit
    def choose(logits):
        z, edges = dist.scores_and_edges(
            logits[None, None], jnp.zeros((1, 1), jnp.int32)
        )
        scores = z[:, 0] + noise
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return token[0], choice_margin(scores, edges, noise, token)[0]

    token, margin = choose(logits)
    assert token == best
    assert margin == pytest.approx(gap, abs=1e-5)
    changes = np.random.default_rng(0).uniform(-0.49, 0.49, (50, 3))
    for change in changes:  # differences of logits shrink by at most 0.98 of the margin
        assert choose(logits + margin * jnp.asarray(change, jnp.float32))[0] == best


def test_without_filters_the_margin_is_the_gap_of_scores():
    dist = dist_of(sampling_rows([Sampling(), Sampling(temperature=0)]), [0, 3], 9)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1, 9)), jnp.float32)
    z, edges = dist.scores_and_edges(logits, jnp.zeros((1, 1), jnp.int32))
    noise = dist.noise(jnp.int32(0))
    scores = np.asarray(z[:, 0] + noise)
    best = jnp.argmax(z[:, 0] + noise, axis=-1).astype(jnp.int32)
    margin = choice_margin(z[:, 0] + noise, edges, noise, best)
    two = np.sort(scores, axis=-1)[:, -2:]
    np.testing.assert_allclose(margin, two[:, 1] - two[:, 0], atol=1e-6)


@pytest.mark.parametrize("size", [9, 2048])
def test_filters_of_other_rows_do_not_change_a_row(size):
    """Bitwise: a text does not depend on the options of other rows."""
    calm = [Sampling(0.7, seed=1), Sampling(1.6, seed=2), Sampling(0, seed=3)]
    logits = np.random.default_rng(size).normal(size=(4, size)).astype(np.float32)

    @jax.jit
    def best(sampling, logits, depth):
        dist = dist_of(sampling, [5] * len(logits), size)
        return dist.best(logits[:, None], depth, 2), dist.draw(logits, depth)

    alone = sampling_rows(calm)
    room = sampling_rows(calm, filters=True)
    beside = sampling_rows([*calm, Sampling(top_p=0.5, seed=4)])
    assert alone.filters is None and beside.filters is not None
    for depth in range(20):
        want = best(alone, logits[:3], jnp.int32(depth))
        for rows, n in ((room, 3), (beside, 4)):
            (scores, tokens, _), drawn = best(rows, logits[:n], jnp.int32(depth))
            np.testing.assert_array_equal(scores[:3], want[0][0])
            np.testing.assert_array_equal(tokens[:3], want[0][1])
            np.testing.assert_array_equal(drawn[0][:3], want[1][0])
            np.testing.assert_allclose(drawn[1][:3], want[1][1], atol=1e-5)


def test_filters_without_jit():
    """`jax.disable_jit()` runs the loop over bits in Python."""
    rows = sampling_rows([Sampling(top_p=0.6, top_k=2)])
    logits = jnp.asarray([[[2.0, 1.0, 0.5, -1.0]]], jnp.float32)
    want = processed(rows, logits, None)
    with jax.disable_jit():
        np.testing.assert_array_equal(processed(rows, logits, None), want)


def test_noise_depends_only_on_the_row():
    """It depends on seed, sample and place, not on the other rows."""

    def noise(settings, samples, place):
        rows = sampling_rows(settings, jax.random.key(3), samples)
        dist = dist_of(rows, [place - 1] * (len(settings) * samples), 8)
        return np.asarray(dist.noise(jnp.int32(1)))

    a, b = Sampling(seed=11), Sampling(seed=5)
    alone = noise([a], 2, 4)
    np.testing.assert_array_equal(noise([b, a], 2, 4)[2:], alone)
    np.testing.assert_array_equal(noise([a], 3, 4)[:2], alone)
    everything = np.concatenate(
        [alone, noise([b], 2, 4), noise([a], 2, 5), noise([Sampling()], 1, 4)]
    )
    assert len(np.unique(everything)) == everything.size
    assert (noise([Sampling(temperature=0)], 1, 4) == 0).all()


def test_invalid_keys_are_refused():
    with pytest.raises(ValueError, match="want a key of jax.random.key, got 3"):
        sampling_rows([Sampling()], 3)
    with pytest.raises(ValueError, match="want one key, got keys"):
        sampling_rows([Sampling()], jax.random.split(jax.random.key(0)))
    old = sampling_rows([Sampling()], jax.random.PRNGKey(0))
    new = sampling_rows([Sampling()], jax.random.key(0))
    assert (
        jax.random.key_data(old.key).tolist() == jax.random.key_data(new.key).tolist()
    )


WRONG = pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": -1.0}, r"temperature: want 0 \(greedy\) or .*, got -1.0"),
        ({"temperature": 1e300}, "temperature: want"),
        ({"temperature": "1"}, "temperature: want"),
        ({"top_p": 1e-40}, "top_p: want"),
        ({"top_k": 2**31}, "top_k: want"),
        ({"top_k": 1.5}, "top_k: want"),
        ({"seed": 1.5}, "seed: want"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty: want"),
        ({"temperature": float("nan")}, "temperature: want"),
        ({"top_k": -1}, "top_k: want"),
        ({"top_p": 0.0}, "top_p: want"),
        ({"top_p": 1.1}, "top_p: want"),
        ({"min_p": 1.1}, "min_p: want"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: want"),
        ({"seed": -1}, "seed: want"),
        ({"seed": 2**32}, "seed: want"),
    ],
)


@WRONG
def test_invalid_settings_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**option)


@WRONG
def test_invalid_arrays_of_settings_are_refused(option, message):
    """The same values, for one of two prompts."""
    ((name, value),) = option.items()
    good = dict(seed=0, temperature=1.0, top_k=1).get(name, 0.5)
    values = {"seeds" if name == "seed" else name: [good, value]}
    with pytest.raises(ValueError, match=f"^{message.replace('seed:', 'seeds:')}"):
        sampling_arrays(2, **values)
    if name != "seed" and not isinstance(value, str) and value != 1e300:
        with pytest.raises(ValueError, match=f"^{message}"):
            sampling_arrays(2, **{name: jnp.asarray(value, jnp.float32)})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 2e6])
def test_invalid_biases_of_arrays_are_refused(wrong):
    with pytest.raises(ValueError, match="^logit_bias: want numbers up to 1e"):
        sampling_arrays(2, logit_bias=jnp.full(8, wrong))
    rows = sampling_arrays(2, logit_bias=jnp.zeros(8))
    with pytest.raises(ValueError, match="^sampling: logit_bias: want numbers up"):
        check_rows("sampling", replace(rows, bias=rows.bias + wrong))


def test_settings_that_are_usual_in_arrays_are_accepted():
    """Tokens are excluded by -inf, and 1 is what float32 has for 0.99999999."""
    banned = jnp.where(jnp.arange(8) == 3, -jnp.inf, 0)
    check_rows("sampling", sampling_arrays(2, logit_bias=banned))
    check_rows("sampling", sampling_rows([Sampling(min_p=0.99999999)]))


def test_settings_that_are_traced_are_not_checked():
    def scaled(number):
        return sampling_arrays(2, temperature=[number, -number], seeds=[1, 2])

    assert jax.jit(scaled)(1.0).temperature.tolist() == [1, -1]
    with pytest.raises(ValueError, match="^top_k: want an integer"):
        jax.jit(lambda k: sampling_arrays(2, top_k=k))(2.7)
    closed_over = jnp.asarray([1.0, -1.0])
    with pytest.raises(ValueError, match="^temperature: want .* got -1.0"):
        jax.jit(lambda: sampling_arrays(2, temperature=closed_over))()


@pytest.mark.parametrize("prompts", [0, 2.0, "2", None])
def test_a_number_of_prompts_is_an_integer(prompts):
    with pytest.raises(ValueError, match="^prompts: want a number of prompts, static"):
        sampling_arrays(prompts)
