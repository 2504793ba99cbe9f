"""Test names of tensors that differ between layers, as in released models."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import stree_jax
from tests.support.checkpoints import edit_tensors
from tests.support.hf_checkpoints import VOCAB, olmo_hybrid

OLDER = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def newer(layers):
    """Returns a function that gives the norms of these layers their newer names."""

    def change(tensors):
        for name in list(tensors):
            for older, name_now in OLDER.items():
                if f".{older}." in name and int(name.split(".")[2]) in layers:
                    renamed = name.replace(older, name_now)
                    tensors[renamed] = tensors.pop(name)

    return change


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2), (0,), (2,), ()])
def test_norms_of_olmo_hybrid(tmp_path, layers):
    """The released model has the newer names in layers with attention, here layer 1.
    transformers reads any mixture of both."""
    path = tmp_path / "m"
    olmo_hybrid().save_pretrained(path)
    edit_tensors(path, newer(layers))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 12))
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        theirs = other(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(stree_jax.score(stree_jax.load(path), tokens))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
