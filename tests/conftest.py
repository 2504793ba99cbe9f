"""Settings of every test: CPU unless told otherwise, and JAX at its strictest."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# No deadline: an example's first run compiles. The same examples on every run.
hypothesis.settings.register_profile(
    "stree", deadline=None, derandomize=True, max_examples=12, database=None
)
hypothesis.settings.load_profile("stree")


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module():
    """Drop compiled programs; thousands of them exhaust a process's memory maps."""
    yield
    jax.clear_caches()
