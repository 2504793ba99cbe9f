"""Test block drafters in the decoder: the output of every tree equals plain
decoding."""

from functools import partial

import pytest

import stree_jax
from tests.support.dflash import KINDS, random_dflash, with_bigrams
from tests.support.drafting import random_prompts
from tests.support.tiny import tiny

NEW, LENGTHS = 24, [1, 5, 70, 33]
AUTO = "auto:1,4,8"
TREES = ["chain:3", "A", AUTO]


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def write(target, prompts):
    plainly = dict(max_new_tokens=NEW, stop_tokens=(), drafter=None)
    return partial(stree_jax.generate, target, prompts, **plainly)


@pytest.fixture(scope="module")
def plain(write):
    return write()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_plain_decoding(kind, tree, target, write, plain):
    drafter = random_dflash(target, **KINDS[kind])
    out = write(drafter=drafter, tree=tree)
    assert out.tokens == plain.tokens


@pytest.mark.parametrize("tree", ["chain:4", "A", AUTO])
def test_bigrams_are_accepted(tree, target, prompts, write, plain):
    texts = [a + b for a, b in zip(prompts, plain.tokens, strict=True)]
    drafter = random_dflash(target, pairs="vanilla", rank=8)
    out = write(drafter=with_bigrams(drafter, texts), tree=tree)
    assert out.tokens == plain.tokens
    assert min(out.acceptance_length) > 1.3
