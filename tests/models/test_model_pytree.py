"""Test that a model with its tokenizer is one pytree for jit, grad and export."""

import jax
import jax.numpy as jnp
import pytest
from flax import serialization
from jax import export
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stree_jax.models import Model, init_params
from tests.models.configs import CONFIGS

CONFIG = CONFIGS["two mixers a layer"]


def words(*texts):
    return Tokenizer(
        WordLevel({text: i for i, text in enumerate(texts)}, unk_token="a")
    )


def model(tokenizer):
    params = init_params(CONFIG, jax.random.key(0), jnp.float32)
    return Model(params, CONFIG, tokenizer)


def test_copies_of_a_tokenizer_share_one_program():
    traced = []

    @jax.jit
    def halved(model):
        traced.append(1)
        return model.replace(params=jax.tree.map(lambda x: x / 2, model.params))

    one, other = model(words("a", "b")), model(words("a", "b"))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    halved(one)
    assert halved(other).tokenizer.to_str() == other.tokenizer.to_str()
    assert len(traced) == 1


@pytest.mark.parametrize("tokenizer", [None, words("a", "c")], ids=["none", "other"])
def test_a_result_has_the_tokenizer_of_its_argument(tokenizer):
    """A program that was compiled for one tokenizer is not used for another."""
    copied = jax.jit(lambda model: model)
    assert copied(model(words("a", "b"))).tokenizer.token_to_id("b") == 1
    found = copied(model(tokenizer)).tokenizer
    assert (found is None) == (tokenizer is None)
    assert tokenizer is None or found.token_to_id("c") == 1


def test_a_gradient_is_a_model():
    found = jax.grad(lambda m: jnp.sum(m.params["embedding"] ** 2))(model(words("a")))
    assert isinstance(found, Model) and found.config == CONFIG
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(found)
    assert jax.tree_util.keystr(path).startswith(".params[")


def test_an_exported_function_takes_a_model_with_any_tokenizer():
    pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers")

    def scaled(model):
        return model.replace(params=jax.tree.map(lambda x: 2 * x, model.params))

    made = model(words("a", "b"))
    written = export.export(jax.jit(scaled))(made).serialize()
    assert b'"WordLevel"' not in written
    for tokenizer in (words("a", "b"), words("a", "c"), None):
        found = export.deserialize(written).call(model(tokenizer))
        assert found.tokenizer is None
        assert (found.params["embedding"] == 2 * made.params["embedding"]).all()
    assert jax.jit(lambda m: m)(found).tokenizer is None


def test_a_model_without_arrays_has_a_repr():
    """Trees of masks, labels and shapes are models, too."""
    for convert in (lambda x: None, lambda x: "decay", jnp.shape):
        assert "without arrays" in repr(jax.tree.map(convert, model(words("a"))))
    assert "without arrays" in repr(model(None).replace(params={}))


def test_flax_writes_and_restores_a_model():
    made = model(words("a"))
    other = jax.tree.map(lambda x: x + 1, made)
    found = serialization.from_bytes(made, serialization.to_bytes(other))
    assert found.tokenizer is made.tokenizer
    assert (found.params["embedding"] == other.params["embedding"]).all()


def test_models_compare_by_identity():
    one, other = model(None), model(None)
    assert one == one and one != other and len({one, other}) == 2
