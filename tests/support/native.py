"""Instruction sets of the compiled CPU kernels that this machine supports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.cpu_kernels.library import LEVELS, VARIABLE, library

INSTRUCTIONS = library().instructions
built = pytest.mark.skipif(
    INSTRUCTIONS is None, reason=f"CPU kernels: {library().absent}"
)


def each_level(function):
    """Parametrizes a test over `level`, each supported instruction set."""
    best = -1 if INSTRUCTIONS is None else LEVELS[INSTRUCTIONS[0]]
    names = [
        pytest.param(
            name,
            marks=pytest.mark.skipif(n > best, reason=f"no {name} kernels here"),
        )
        for name, n in LEVELS.items()
    ]
    return pytest.mark.parametrize("level", names)(function)


def use(monkeypatch, level):
    """Selects the instruction set of kernels in programs traced from now on."""
    monkeypatch.setenv(VARIABLE, level)
    jax.clear_caches()


def in_place(function, *args):
    """Returns how many kernel results of a program reuse the memory of an argument."""
    return jax.jit(function).lower(*args).as_text().count("output_operand_alias<")


def assert_same(ours, wanted):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.dtype == jnp.float32:
            np.testing.assert_allclose(one, other, rtol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)
