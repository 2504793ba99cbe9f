"""GGUF files of every architecture: the same model as the directory made into one."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.models import by_path
from tests.support.gguf_files import GGUF_CASES, write_gguf

ARCHES = list(GGUF_CASES)
# llama.cpp multiplies the multipliers of these into the weights.
FOLDED = [name for name in ARCHES if name.startswith("falcon")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function: the name of a case -> its directory, its GGUF file, the model."""
    root, known = tmp_path_factory.mktemp("gguf"), {}

    def make(name):
        if name not in known:
            model = GGUF_CASES[name][1]()
            model.save_pretrained(root / name)
            file = write_gguf(root / name, name, root / f"{name}.gguf")
            known[name] = root / name, file, model
        return known[name]

    return make


@pytest.mark.parametrize("name", [n for n in ARCHES if n not in (*FOLDED, "qwen2")])
def test_the_same_parameters_as_of_the_directory(made, name):
    directory, file, _ = made(name)
    theirs, ours = stree_jax.load(directory), stree_jax.load(file)
    assert ours.config == theirs.config.__class__(
        **{**vars(theirs.config), "stop_tokens": ours.config.stop_tokens}
    )
    wanted, found = by_path(theirs.params), by_path(ours.params)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        assert found[path].dtype == leaf.dtype
        if path[-1] == "A_log":  # stored as -exp(A_log)
            np.testing.assert_allclose(found[path], leaf, 1e-6, 1e-6)
        else:
            np.testing.assert_array_equal(found[path], leaf, str(path))


@pytest.mark.parametrize("name", [*FOLDED, "qwen2", "llama"])
def test_the_same_logits_as_transformers(made, name):
    _, file, other = made(name)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 20))
    with torch.no_grad():
        theirs = other(torch.tensor(tokens)).logits[0].numpy()
    ours = stree_jax.score(stree_jax.load(file), jnp.asarray(tokens))
    np.testing.assert_allclose(np.asarray(ours)[0], theirs, rtol=0, atol=1e-4)
