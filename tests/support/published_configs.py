"""Published configs that are read without their tensors, and checks of the logits of
transformers' models."""

import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.convert.families import families
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from tests.support.hf_random import VOCAB

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)[None]


def parsed(values, name="model.embed_tokens.weight", rows=1000):
    """Reads a config, given a file that has only an embedding, with this name and so
    many rows, and a head."""
    width = (values.get("text_config") or values).get("hidden_size", 2560)
    tensors = {
        each: TensorInfo("w", (rows, width), "bfloat16")
        for each in (name, "lm_head.weight")
    }
    family = families()[values["model_type"]]
    return family.parse(ConfigFields("config.json", values, tensors=tensors))


def theirs_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def close(model, theirs):
    ours = np.asarray(stree_jax.score(model, TOKENS))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def language_model(other, directory, left_out):
    """Loads the language model of a multimodal one, which has the same logits.

    Args:
      other: transformers' model.
      directory: where it is saved.
      left_out: what the warning says.
    """
    other.save_pretrained(directory)
    with pytest.warns(UserWarning, match=left_out):
        model = stree_jax.load(directory)
    close(model, theirs_of(other))
    return model
