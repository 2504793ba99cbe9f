"""Reasoning before an answer: free up to its budget, then ended, then a structure."""

import dataclasses

import numpy as np
import pytest

import stree_jax
from stree_jax import Constraint, Reasoning, Sampling
from stree_jax.constraints.reasoning import after_reasoning, anything
from stree_jax.constraints.rows import vocabulary_of
from stree_jax.sampling.constraints import NONE

OPTIONS = dict(max_new_tokens=24, stop_tokens=())
SETTINGS = [None, Sampling(1.0, seed=4)]


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo")


@pytest.fixture(scope="module")
def texts(model):
    """Texts without a constraint, and a token that they do not contain."""
    prompts = ["def f(x):\n    return", "import os\n"]
    found = [
        stree_jax.generate(model, prompts, drafter=None, sampling=s, **OPTIONS)
        for s in SETTINGS
    ]
    used = {token for one in found for row in one.tokens for token in row}
    names = (model.tokenizer.id_to_token(i) for i in range(300, 2000))
    end = next(n for i, n in enumerate(names, 300) if i not in used and n.isascii())
    return prompts, found, end


def run(model, prompts, sampling, constraint, **options):
    return stree_jax.generate(
        model, prompts, sampling=sampling, constraint=constraint, **OPTIONS | options
    )


@pytest.mark.parametrize("which", [0, 1], ids=["greedy", "sampled"])
def test_the_budget_ends_reasoning_and_changes_nothing_else(model, texts, which):
    prompts, found, end = texts
    token, sampling = model.tokenizer.token_to_id(end), SETTINGS[which]
    constraint = Constraint(None, reasoning=Reasoning(7, end))
    plain = run(model, prompts, sampling, constraint, drafter=None)
    for row, free in zip(plain.tokens, found[which].tokens, strict=True):
        assert row[:7] == free[:7] and row[7] == token
    assert len({len(row) for row in plain.tokens}) == 1  # the answer is free
    for options in (dict(drafter="lookup", tree="A"), dict(drafter="lookup")):
        drafted = run(model, prompts, sampling, constraint, **options)
        assert drafted.tokens == plain.tokens
    large = Constraint(None, reasoning=Reasoning(24, end))
    whole = run(model, prompts, sampling, large, drafter=None)
    assert whole.tokens == found[which].tokens


@pytest.mark.parametrize("budget", [0, 5, None])
def test_a_structure_follows_the_end(model, texts, budget):
    prompts, found, end = texts
    if budget is None:  # a token that is in the texts ends them
        end = model.tokenizer.id_to_token(found[0].tokens[0][6])
    token = model.tokenizer.token_to_id(end)
    constraint = Constraint("yes|no", reasoning=Reasoning(budget, end))
    done = run(model, prompts[:1], None, constraint, drafter=None)
    (row,) = done.tokens
    place = row.index(token)
    assert place == (budget if budget is not None else found[0].tokens[0].index(token))
    assert model.tokenizer.decode(row[place + 1 :]).strip() in ("yes", "no")
    assert done.finish_reasons == ["stop"]
    drafted = run(model, prompts[:1], None, constraint, drafter="lookup", tree="A")
    assert drafted.tokens == done.tokens
    assert drafted.target_calls[0] <= done.target_calls[0]


def test_an_answer_may_begin_without_reasoning(model, texts):
    prompts, found, end = texts
    first = [row[0] for row in found[0].tokens]
    begin = model.tokenizer.id_to_token(first[0])
    token = model.tokenizer.token_to_id(end)
    constraint = Constraint(None, reasoning=Reasoning(3, end, begin))
    done = run(model, prompts, None, constraint, drafter=None)
    assert done.tokens[0][:4] == found[0].tokens[0][:4] and done.tokens[0][4] == token
    assert first[1] != first[0] and done.tokens[1] == found[0].tokens[1]


def test_stop_tokens_do_not_end_reasoning_before_a_structure():
    tables = after_reasoning(anything(6), 2, end=3, stops=(4, 5))
    following, classes = tables.following, tables.classes
    inside = following[0, classes]
    assert inside.tolist() == [1, 1, 1, 3, NONE, NONE] and not tables.may_end[:3].any()
    assert following[2, classes].tolist() == [NONE, NONE, NONE, 3, NONE, NONE]
    assert (following[3, classes] == 3).all() and tables.may_end[3]
    assert tables.forced[2, 0] == 3 and (tables.forced[:2] == NONE).all()


def test_a_later_call_goes_on_where_the_reasoning_was(model, texts):
    prompts, _, end = texts
    constraint = Constraint("[0-9]{4}", reasoning=Reasoning(6, end))
    whole = run(model, prompts[:1], None, constraint)
    first = run(model, prompts[:1], None, constraint, max_new_tokens=4, keep_past=True)
    later = dataclasses.replace(constraint, written=tuple(first.tokens[0]))
    rest = run(model, [""], None, later, past=first.past)
    assert first.tokens[0] + rest.tokens[0] == whole.tokens[0]


def test_large_budgets_are_made_quickly(model):
    vocabulary = vocabulary_of(model)
    end = model.tokenizer.id_to_token(500)
    tables = vocabulary.tables(Constraint(None, reasoning=Reasoning(2**15, end)))
    assert tables.following.shape[0] == 2**15 + 2
    assert tables.following.dtype == tables.classes.dtype == np.int32
    with pytest.raises(ValueError, match="regex: want a budget of at most"):
        many = anything(4000)
        wide = np.full((1, 4000), 0, np.int32)
        many = dataclasses.replace(many, classes=np.arange(4000), following=wide)
        after_reasoning(many, 2**15, end=3, name="regex")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reasoning(-1), "budget: want"),
        (lambda: Reasoning("8"), "budget: want"),
        (lambda: Reasoning(2**15 + 1), "budget: want"),
        (lambda: Reasoning(8, ""), "end: want"),
        (lambda: Reasoning(8, begin=3), "begin: want"),
        (lambda: Constraint(None), "regex: want a text"),
        (lambda: Constraint("a", reasoning=8), "reasoning: want a Reasoning"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_end_that_is_no_token_is_named(model):
    constraint = Constraint(None, reasoning=Reasoning(8, "</thought of nothing>"))
    with pytest.raises(ValueError, match="reasoning: want the text of one token"):
        stree_jax.generate(model, "x", constraint=constraint)
