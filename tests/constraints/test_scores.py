"""Test that `token_logprobs` has the numbers of constrained and penalised rollouts, and
that classic mistakes are noticed."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Constraint, Sampling, cpu_kernels
from stree_jax.constraints.rows import constraint_rows
from stree_jax.generation import token_logprobs as scores
from stree_jax.sampling import sampling_rows
from tests.support.pieces import piece_tokenizer
from tests.support.tiny import tiny

PERSON = Constraint(r'\{"name":"[a-z]{0,9}","age":[0-9]{1,3},"admin":(?:true|false)\}')
DIGITS = Constraint("(?:[0-9]+ ?)+")  # may end after any digit: a stop token ends it
PROMPTS = ["def person():\n    return ", "x = [" + "1, 2, 3, " * 15 + "4]\ny = "]
PENALISED = Sampling(
    0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
)
SETTINGS = {
    "greedy": None,
    "sampled": Sampling(0.9, top_p=0.9, min_p=0.01),
    "penalised": PENALISED,
    "biased": Sampling(1.1, logit_bias={91: 2.0}),
}
N, MOST = 2, 40
needs_kernels = pytest.mark.skipif(
    cpu_kernels.level() is None, reason="bits of the CPU kernels"
)


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def rollout(model):
    ids = [model.tokenizer.encode(text).ids for text in PROMPTS]
    prompts = np.zeros((2, max(map(len, ids))), np.int32)
    for row, text in zip(prompts, ids, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in ids])
    assert lengths[1] > 64 > lengths[0], "prompts in one and in several chunks"

    def rollout(sampling, constraint, **options):
        done = stree_jax.generate_tokens(
            *(model, prompts, lengths),
            max_new_tokens=MOST,
            constraint=constraint,
            sampling=sampling,
            logprobs=0,
            n=N,
            **dict(drafter="lookup", tree="chain:3") | options,
        )
        return done, done.joined(prompts, lengths)

    return rollout


def scored(model, done, texts, sampling, constraint, **options):
    if sampling is not None and sampling.penalised:
        sampling = sampling_rows([sampling] * len(texts.tokens))
    return stree_jax.token_logprobs(
        *(model, texts.tokens, texts.lengths),
        sampling=sampling,
        constraint=constraint,
        prompt_lengths=texts.lengths - done.length,
        **options,
    )


def same_bits(model, rollout, sampling, constraint):
    done, texts = rollout(sampling, constraint)
    found = scored(model, done, texts, sampling, constraint)
    own = np.asarray(done.logprobs.processed)[np.asarray(done.mask)]
    assert own.size and np.isfinite(own).all()
    assert not np.asarray(found)[~np.asarray(texts.output)].any()
    return np.array_equal(np.asarray(found)[np.asarray(texts.output)], own)


@needs_kernels
@pytest.mark.parametrize("name", SETTINGS)
def test_scores_of_a_rollout_are_its_own_bits(model, rollout, name):
    for constraint in ([PERSON, DIGITS], [None, PERSON]):
        assert same_bits(model, rollout, SETTINGS[name], constraint)


@needs_kernels
def test_penalties_alone_count_the_output(model, rollout):
    assert same_bits(model, rollout, PENALISED, None)


@needs_kernels
def test_one_row_at_a_time_and_in_groups(model, rollout):
    done, texts = rollout(PENALISED, [PERSON, DIGITS])
    together = scored(model, done, texts, PENALISED, [PERSON, DIGITS])
    scores._token_logprobs.clear_cache()
    with mock.patch.object(scores, "MOST_LOGITS", 1):
        apart = scored(model, done, texts, PENALISED, [PERSON, DIGITS])
    scores._token_logprobs.clear_cache()
    assert np.array_equal(apart, together)
    many = jax.tree.map(lambda x: jnp.concatenate([x] * 5), (done, texts))
    each = [PERSON, PERSON, DIGITS, DIGITS] * 5
    found = scored(model, *many, PENALISED, each)
    assert np.array_equal(found, jnp.concatenate([together] * 5))


def test_a_token_that_breaks_the_constraint_is_impossible(model):
    ids = model.tokenizer.encode("x = ").ids
    text = [*ids, *model.tokenizer.encode("12;3", add_special_tokens=False).ids]
    found = stree_jax.token_logprobs(
        model, [text], constraint=DIGITS, prompt_lengths=[len(ids)]
    )[0]
    place = len(text) - 2
    assert np.isneginf(found).tolist() == [i == place for i in range(len(text))]


def test_stop_tokens_may_end_it_where_it_matches(model):
    (stop,) = model.tokenizer.encode("~", add_special_tokens=False).ids
    (one,) = model.tokenizer.encode("1", add_special_tokens=False).ids
    ids = model.tokenizer.encode("x = ").ids
    text = [*ids, one, stop]
    options = dict(constraint=DIGITS, prompt_lengths=[len(ids)])
    ended = stree_jax.token_logprobs(model, [text], stop_tokens=[stop], **options)
    assert np.isfinite(ended).all() and ended[0, -1] < 0
    other = stree_jax.token_logprobs(model, [text], **options)
    assert np.isneginf(other[0, -1])
    more = options | dict(stop_tokens=[stop], min_new_tokens=2)
    assert np.isneginf(stree_jax.token_logprobs(model, [text], **more)[0, -1])
    assert np.isfinite(stree_jax.token_logprobs(model, [text], **more)[0, :-1]).all()
    early = stree_jax.token_logprobs(
        model, [[*ids, stop]], stop_tokens=[stop], **options
    )
    assert np.isneginf(early[0, -1])


def test_constraints_are_data_of_a_trainers_program(model, rollout):
    traces = []

    @jax.jit
    def run(tokens, lengths, prompt, rows):
        traces.append(1)
        options = dict(constraint=rows, prompt_lengths=prompt)
        return stree_jax.token_logprobs(model, tokens, lengths, **options)

    for constraints in ([PERSON, DIGITS], [DIGITS, PERSON]):
        done, texts = rollout(None, constraints)
        rows = constraint_rows(model, constraints)  # by prompt, as for the rollout
        found = run(texts.tokens, texts.lengths, texts.lengths - done.length, rows)
        wanted = scored(model, done, texts, None, constraints)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert len(traces) == 1


def test_the_gradient_is_that_of_masked_logits():
    """On a tiny model, against the masks of a whole table of logits."""
    model = tiny(1, layers=("attention", "mlp"))
    model = replace(model, tokenizer=piece_tokenizer())
    model = replace(model, config=replace(model.config, stop_tokens=(0,)))
    constraint, prompt = Constraint("(?:ab|ba c|é|€b){2,3}"), 5
    done = stree_jax.generate_tokens(
        *(model, [[9, 10, 11, 12, 13]]),
        max_new_tokens=12,
        constraint=constraint,
        sampling=Sampling(1.0),
        logprobs=0,
    )
    text = done.joined([[9, 10, 11, 12, 13]])
    rows = constraint_rows(model, [constraint])
    states = [rows.start]
    for token in done.tokens[0, : done.length[0] - 1]:
        states.append(rows.after(states[-1], token[None]))
    stop = jnp.zeros((1, model.config.num_tokens), bool).at[0, 0].set(True)
    allowed = rows.allowed(jnp.stack(states, axis=1), stop)[0]
    length = int(text.lengths[0])
    tokens = text.tokens[:, :length]

    def ours(params):
        found = stree_jax.token_logprobs(
            *(model.replace(params=params), tokens),
            constraint=constraint,
            prompt_lengths=[prompt],
        )
        return found.sum()

    def whole(params):
        logits = stree_jax.score(model.replace(params=params), tokens)[0]
        logits = logits[prompt - 1 : -1, : model.config.num_tokens]
        z = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))
        return jnp.take_along_axis(z, tokens[0, prompt:, None], axis=1).sum()

    (value, slope), (wanted, expected) = (
        jax.value_and_grad(f)(model.params) for f in (ours, whole)
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (slope, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1e-3, float(abs(b).max())))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(slope))


_states, _tokens_of = scores._states, scores.tokens_of
MISTAKES = {
    "a token late": lambda c, t, p: jnp.roll(_states(c, t, p), 1, axis=1),
    "from the first token": lambda c, t, p: _states(c, t, jnp.ones_like(p)),
    "a token into the output": lambda c, t, p: _states(c, t, p + 1),
    "one automaton for all": lambda c, t, p: _states(
        replace(c, automaton=jnp.zeros_like(c.automaton)), t, p
    ),
}


@needs_kernels
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(model, rollout, name):
    done, texts = rollout(SETTINGS["sampled"], [PERSON, DIGITS])
    scores._token_logprobs.clear_cache()
    with mock.patch.object(scores, "_states", MISTAKES[name]):
        found = scored(model, done, texts, SETTINGS["sampled"], [PERSON, DIGITS])
    scores._token_logprobs.clear_cache()
    assert not np.array_equal(found[texts.output], done.logprobs.processed[done.mask])


@needs_kernels
def test_prompts_that_count_as_outputs_are_noticed(model, rollout):
    done, texts = rollout(PENALISED, None)
    scores._token_logprobs.clear_cache()
    twice = lambda *args: 2 * _tokens_of(*args).astype(jnp.int32)  # noqa: E731
    with mock.patch.object(scores, "tokens_of", twice):
        found = scored(model, done, texts, PENALISED, None)
    scores._token_logprobs.clear_cache()
    assert not np.array_equal(found[texts.output], done.logprobs.processed[done.mask])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(constraint=DIGITS), "prompt_lengths: want them"),
        (dict(constraint=DIGITS, prompt_lengths=[4]), "prompt_lengths: 4..4 are not"),
        (dict(constraint=DIGITS, prompt_lengths=[0]), "prompt_lengths: 0..0 are not"),
        (dict(constraint=[DIGITS] * 2, prompt_lengths=[1]), "constraint: want a Const"),
        (dict(constraint="a", prompt_lengths=[1]), "constraint: want a Const"),
        (dict(sampling=PENALISED), "sampling: want no presence_penalty"),
        (dict(stop_tokens=[1]), "stop_tokens: only for a constraint or min_new"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(model, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        stree_jax.token_logprobs(model, [[60, 61, 62]], **options)
