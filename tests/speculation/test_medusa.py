"""Texts that Medusa heads draft for, and what does not go with them."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, sampling_rows
from stree_jax.cost import Acceptance, expected_tau
from stree_jax.generation import ASSUMED_RANKS, accuracy_of, sparse_tree, tree_for
from stree_jax.speculation.tree import cartesian, make_tree, resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.support.heads import random_heads
from tests.support.tiny import REAL, STOP, perturbed, tiny

NEW = 24
TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]  # three levels, uneven


@pytest.fixture(scope="module")
def target():
    """A model that soon repeats itself, as small ones do."""
    model = tiny(1, layers=("mamba", "attention"))
    return model.replace(params=perturbed(model.params, 0.3, 3))


@pytest.fixture(scope="module")
def heads(target):
    """Nearly the model's own head, and so right where a token comes again."""
    return random_heads(target, scale=0.03, heads=4)


SETTINGS = {
    "greedy": dict(),
    "sampled": dict(
        sampling=[Sampling(0.3), Sampling(0.5, top_p=0.9), Sampling(0.0)], n=2
    ),
    "naive": dict(sampling=Sampling(0.3, top_k=4), rule="naive"),
    "penalty": dict(sampling=[Sampling(t, repetition_penalty=1.3) for t in (0, 0.5)]),
    "greedy with a past": dict(min_new_tokens=9, stop_tokens=()),
}


def plainly(options):
    return {k: v for k, v in options.items() if k != "rule"}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_plain_decodings(target, heads, prompts, name):
    """Batches of different lengths, with ends in the middle of an accepted run."""
    options = dict(max_new_tokens=[NEW, 5, NEW], **SETTINGS[name])
    if name == "penalty":
        prompts, options["max_new_tokens"] = prompts[1:], NEW
    plain = stree_jax.generate(target, prompts, **plainly(options))
    result = stree_jax.generate(target, prompts, drafter=heads, tree=TREE, **options)
    assert result.tokens == plain.tokens
    assert result.finish_reasons == plain.finish_reasons
    assert result.promise == "tokens"
    assert [stage.stage for stage in result.traffic] == ["target", "heads"]
    print(name, result.target_calls, plain.target_calls)
    if name != "penalty":
        assert result.target_calls.sum() < 0.9 * plain.target_calls.sum()
