"""Models and prompts shared by the tests of this folder, unless they need others."""

import numpy as np
import pytest

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
