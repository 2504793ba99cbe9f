"""Penalties and biases: against NumPy, on trees, and where arrays are traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import stree_jax
from stree_jax import Sampling
from stree_jax.sampling import sampling_arrays, sampling_rows
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests

BANNED, MOST = 17, 24
SETTINGS = [
    Sampling(0, presence_penalty=1.5),
    Sampling(0, frequency_penalty=0.7, logit_bias={BANNED: -100, 40: 3}),
    Sampling(0.8, repetition_penalty=1.2, presence_penalty=-0.5, seed=1),
    Sampling(1.0, frequency_penalty=1.5, logit_bias=((265, 4.0), (12, 4.0)), seed=2),
]


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo")


@pytest.fixture(scope="module")
def prompts(model):
    lines = ("def f(x):\n    return x", "import os\nimport sys\n", "a, b, a, b, a", "#")
    return [model.tokenizer.encode(line).ids for line in lines]


@pytest.fixture(scope="module")
def plain(model, prompts):
    return stree_jax.generate(
        model,
        prompts,
        max_new_tokens=MOST,
        drafter=None,
        sampling=SETTINGS,
        stop_tokens=(),
        logprobs=0,
    )


def changed(logits, settings, prompt, output):
    """Returns logits after biases and penalties, in float64."""
    z = logits.astype(np.float64)
    for token, add in settings.logit_bias:
        z[token] += add
    there = sorted({*prompt, *output})
    rate = settings.repetition_penalty
    z[there] = np.where(z[there] > 0, z[there] / rate, z[there] * rate)
    for token in output:
        z[token] -= settings.frequency_penalty
    z[sorted(set(output))] -= settings.presence_penalty
    return z


def test_they_are_as_in_numpy(model, prompts, plain):
    for row, (settings, prompt) in enumerate(zip(SETTINGS, prompts, strict=True)):
        output = plain.tokens[row]
        raw = np.asarray(stree_jax.score(model, [[*prompt, *output]]))[0]
        for place, token in enumerate(output):
            logits = raw[len(prompt) + place - 1, : model.config.num_tokens]
            z = changed(logits, settings, prompt, output[:place])
            if settings.temperature == 0:
                assert z[token] >= z.max() - 1e-3
            else:
                own = log_softmax(z / settings.temperature)[token]
                assert abs(own - plain.logprobs[row].processed[place]) < 1e-3


def test_they_change_the_texts(model, prompts, plain):
    """Or else the other tests would show little."""
    without = [Sampling(s.temperature, seed=s.seed) for s in SETTINGS]
    options = dict(max_new_tokens=MOST, drafter=None, stop_tokens=())
    other = stree_jax.generate(model, prompts, sampling=without, **options)
    for one, two in zip(plain.tokens, other.tokens, strict=True):
        assert one != two
    assert BANNED not in plain.tokens[1]


@pytest.mark.parametrize(
    "options",
    [
        dict(drafter="lookup", tree="B"),
        dict(drafter="model", tree="A", rule="mss"),
        dict(drafter="lookup"),
        dict(drafter="model", tree="beam:3x4"),
    ],
    ids=["tree", "mss", "auto", "beam"],
)
def test_trees_give_the_same_texts(model, prompts, plain, options):
    """With another rule, greedy rows only."""
    if options["drafter"] == "model":
        options = options | dict(drafter=model)
    asked = dict(max_new_tokens=MOST, sampling=SETTINGS, stop_tokens=(), logprobs=0)
    found = stree_jax.generate(model, prompts, **asked, **options)
    rows = 2 if options.get("rule") else len(prompts)
    assert found.tokens[:rows] == plain.tokens[:rows]
    if "tree" in options and rows == len(prompts):
        assert found.target_calls.sum() < plain.target_calls.sum()


def test_a_penalty_of_the_root_alone_is_found():
    """The planted mistake: the nodes below the root do not count."""
    path = jnp.asarray([[[0, 0], [0, 5]]])
    rows = sampling_rows([Sampling(1.0, frequency_penalty=1.0)])
    zeros = jnp.zeros((1,), jnp.int32)
    requests = Requests(zeros, None, zeros[:, None] - 1, None, rows)
    dist = Distribution(requests, zeros, jnp.zeros((1, 8), jnp.int32), 8)
    logits, depth = jnp.ones((1, 2, 8)), jnp.asarray([[0, 1]])
    right = np.asarray(dist.scores(logits, depth, path))[0]
    assert np.argmin(right[1]) == 5 and np.ptp(right[0]) == 0
    wrong = np.asarray(dist.scores(logits, depth))[0]
    assert np.ptp(wrong[1]) == 0


def test_arrays_may_be_traced(model, prompts, plain):
    """One program for all values; equal to `Sampling`."""
    traces = []

    @jax.jit
    def run(model, prompt, presence, bias):
        traces.append(1)
        sampling = sampling_arrays(
            1, temperature=0.0, presence_penalty=presence, logit_bias=bias
        )
        return stree_jax.generate_tokens(
            model, prompt, max_new_tokens=MOST, sampling=sampling, stop_tokens=()
        ).tokens

    bias = np.zeros(model.config.num_tokens, np.float32)
    prompt = np.asarray([prompts[0]])
    first = run(model, prompt, 1.5, bias)
    assert first[0].tolist() == plain.tokens[0]
    bias[plain.tokens[0][0]] = -100
    other = run(model, prompt, 1.5, bias)
    assert plain.tokens[0][0] not in other[0].tolist() and len(traces) == 1


def test_the_trainer_has_the_same_numbers(model, prompts, plain):
    settings, prompt, output = SETTINGS[2], prompts[2], plain.tokens[2]
    with pytest.raises(ValueError, match="presence_penalty, which counts outputs"):
        stree_jax.token_logprobs(model, [prompt], sampling=settings)
    asked = Sampling(1.0, repetition_penalty=1.2, logit_bias={9: 1.0}, seed=1)
    done = stree_jax.generate(
        model, [prompt], max_new_tokens=MOST, sampling=asked, logprobs=0, stop_tokens=()
    )
    text = [*prompt, *done.tokens[0]]
    found = stree_jax.token_logprobs(model, [text], sampling=asked)[0, len(prompt) :]
    np.testing.assert_allclose(found, done.logprobs[0].processed, atol=1e-5)
    assert len(output) == MOST


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", "1"),
        ("frequency_penalty", float("nan")),
        ("logit_bias", 3),
        ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: float("inf")}),
        ("logit_bias", [(5, 1.0), (5, 2.0)]),
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field}: want "):
        Sampling(**{field: value})


def test_tokens_outside_the_vocabulary_are_named(model, prompts):
    sampling = Sampling(logit_bias={10**6: 1.0})
    with pytest.raises(ValueError, match="logit_bias: want token ids below 2048"):
        stree_jax.generate(model, prompts[:1], sampling=sampling)
    with pytest.raises(ValueError, match="num_tokens: needed for logit_bias"):
        sampling_rows([sampling])
    rows = sampling_arrays(1, logit_bias=np.zeros(5))
    with pytest.raises(ValueError, match="one number for each of the 2048 tokens"):
        stree_jax.generate_tokens(
            model, np.asarray([prompts[0]]), max_new_tokens=4, sampling=rows
        )
    with pytest.raises(ValueError, match="logit_bias: want"):
        sampling_arrays(2, logit_bias=np.zeros((3, 5)))
