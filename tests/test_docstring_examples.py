"""Run the example in the docstring of every public name."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import adapters, pallas_kernels, trees
from stree_jax.drafters import EarlierTexts

GLOBALS = {"stree_jax": stree_jax, "jax": jax, "jnp": jnp, "np": np}
GLOBALS |= {"pallas_kernels": pallas_kernels, "EarlierTexts": EarlierTexts}
GLOBALS["adapters"] = adapters
TREES = [name for name, value in vars(trees).items() if callable(value)]
PUBLIC = {
    f"stree_jax.{name}": value
    for name in stree_jax.__all__
    if callable(value := getattr(stree_jax, name))
}
PUBLIC |= {f"stree_jax.trees.{name}": getattr(trees, name) for name in TREES}
PUBLIC["stree_jax.pallas_kernels.without_kernels"] = pallas_kernels.without_kernels
PUBLIC["stree_jax.drafters.EarlierTexts"] = EarlierTexts
PUBLIC["stree_jax.adapters.with_adapter"] = adapters.with_adapter


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_shows_what_it_prints(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    finder, printed = doctest.DocTestFinder(recurse=False), []
    runner = doctest.DocTestRunner(optionflags=flags)
    found = finder.find(PUBLIC[name], name, module=False, globs=dict(GLOBALS))
    examples = [test for test in found if test.examples]
    assert examples, f"{name}: its docstring has no example"
    for test in examples:
        runner.run(test, out=printed.append)
    assert runner.failures == 0, "".join(printed)
