"""Which instructions a program has is settled when it is traced: none is kept."""

import jax
import pytest


@pytest.fixture(autouse=True)
def programs_of_one_test():
    yield
    jax.clear_caches()
