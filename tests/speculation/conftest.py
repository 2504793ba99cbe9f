"""Models and prompts shared by the tests of this folder, unless they need others."""

from functools import partial

import numpy as np
import pytest

import stree_jax
from tests.speculation.steps import LENGTHS
from tests.support.tiny import REAL, perturbed, tiny


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def drafter(target):
    """Returns a draft model whose tokens are accepted now and then."""
    return target.replace(params=perturbed(target.params, 0.05, 3))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def write(target, prompts):
    """Returns a function that generates 24 tokens after the prompts, plainly unless its
    options say otherwise."""
    plainly = dict(max_new_tokens=24, stop_tokens=(), drafter=None)
    return partial(stree_jax.generate, target, prompts, **plainly)


@pytest.fixture(scope="module")
def plain(write):
    return write()
