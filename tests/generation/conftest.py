"""Compiling takes most of the time, so nearly all calls go through `ask`, which keeps
to one set of options and sizes: they share their programs.
"""

import dataclasses

import numpy as np
import pytest

import stree_jax
from tests.generation.batch import (
    CAPACITY,
    LENGTHS,
    NEW,
    QUIET,
    SAMPLING,
    TREE,
)
from tests.support.pieces import PIECES, across, piece_tokenizer
from tests.support.tiny import REAL, perturbed, tiny


@pytest.fixture(scope="module")
def tokenizer():
    assert len(PIECES) == len(set(PIECES)) == REAL
    return piece_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    model = tiny(1, layers=("mamba", "attention", "mlp"))
    config = dataclasses.replace(model.config, stop_tokens=(29, 42))
    return dataclasses.replace(model, tokenizer=tokenizer, config=config)


@pytest.fixture(scope="module")
def drafter(target):
    return target.replace(params=perturbed(target.params, 0.05, 3))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def ask(target, prompts):
    """`generate` (or another function) with options that share their programs."""

    def ask(*, call=stree_jax.generate, prompts=prompts, model=target, **options):
        if options.get("drafter") is not None:
            options = dict(tree=TREE) | options
        defaults = dict(
            max_new_tokens=NEW,
            drafter=None,
            sampling=SAMPLING,
            min_new_tokens=[0, 1, 1, 1],
            stop_tokens=(),
            stop_strings=QUIET,
            logprobs=3,
            capacity=CAPACITY,
        )
        return call(model, prompts, **defaults | options)

    return ask


@pytest.fixture(scope="module")
def greedily(ask):
    """The same for greedy batches: no sampling, no stop strings."""

    def greedily(**options):
        return ask(**dict(sampling=None, stop_strings=(), logprobs=2) | options)

    return greedily


@pytest.fixture(scope="module")
def free(ask):
    """Plain sampling that nothing stops."""
    return ask()


@pytest.fixture(params=["plain", "tree"])
def arm(request, drafter):
    """Options of either way of decoding."""
    return {} if request.param == "plain" else {"drafter": drafter}


@pytest.fixture(scope="module")
def strings_of(free):
    """Stop strings that span tokens: for rows 0..3, of 1 to 4 characters."""
    table = [
        [string for size in (1, 2, 3, 4) for string in across(tokens, size)[:3]]
        for tokens in free.tokens
    ]
    assert all(len(row) >= 6 for row in table)
    assert all(not row[0].isascii() for row in table)
    return table
