"""Clears JAX's caches, because a program's instructions are fixed when it is traced."""

import jax
import pytest

from tests.support.native import use


@pytest.fixture(autouse=True)
def programs_of_one_test():
    yield
    jax.clear_caches()


@pytest.fixture
def both(monkeypatch):
    """Returns a function's results with the kernels and without them."""

    def run(function, *args):
        outs = []
        for level in ("portable", "off"):
            use(monkeypatch, level)
            jax.clear_caches()
            program = jax.jit(lambda args: function(*args))
            called = "stree_" in program.lower(args).as_text()
            assert called == (level != "off")
            outs.append(program(args))
        return outs

    return run
