"""Test the acceptance of the bundled DSpark drafter.

A block drafter that is read wrongly leaves every text exact. Only how many drafts are
accepted shows such a mistake, so these tests set lower bounds on it.
"""

from dataclasses import replace

import pytest

import stree_jax
from stree_jax.speculation.tree import Budget
from stree_jax.verify.agreement import agreement, joined
from tests.support.bundled import PROMPTS

NEW = 48
LEAST = 2.0  # of the tree of 16 nodes
OVER_CHAIN = 1.1


@pytest.fixture(scope="module")
def target():
    return stree_jax.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def drafter(target):
    return stree_jax.load_drafter("demo-dspark", dtype="float32", target=target)


@pytest.fixture(scope="module")
def tau(target):
    prompts = [target.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    said = stree_jax.generate(target, prompts, max_new_tokens=NEW, stop_tokens=())

    def measured(drafter, tree):
        parts = [
            agreement(target, drafter, [*ids, *own], tree).after(len(ids) - 1)
            for ids, own in zip(prompts, said.tokens, strict=True)
        ]
        return joined(parts).tau()

    return measured


def test_the_tree_accepts_more_than_the_chain(tau, drafter):
    chain, tree = tau(drafter, "chain:5"), tau(drafter, Budget(16, 5))
    assert tree > LEAST
    assert tree > OVER_CHAIN * chain


def test_wrong_readings_accept_less(tau, drafter):
    right, c = tau(drafter, "chain:3"), drafter.config
    wrong = {
        "without pairs": replace(c, pairs="", confidence=False),
        "wrong first slot": replace(c, from_root=False),
        "early layers": replace(c, boundaries=(0, 1, 2)),
    }
    for name, config in wrong.items():
        assert tau(replace(drafter, config=config), "chain:3") < 0.9 * right, name


def test_text_is_that_of_plain_decoding(target, drafter):
    options = dict(max_new_tokens=32, stop_tokens=())
    plain = stree_jax.generate(target, list(PROMPTS), drafter=None, **options)
    found = stree_jax.generate(target, list(PROMPTS), drafter=drafter, **options)
    assert found.tokens == plain.tokens
