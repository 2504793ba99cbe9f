"""Test edits of config.json that need more than equal logits: windows of llama, fields
that transformers misreads, exports of scaled rotary embeddings, text with YaRN."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.convert import checked, open_local
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models.stack.config_json import from_json, to_json
from tests.support.edited_config import TOKENS, YARN


def test_sliding_windows_of_llama_are_refused(edited):
    """With a cache, transformers applies the config's window to llama, so that its text
    differs between one forward pass and step-by-step decoding. A window that would hide
    tokens is therefore refused."""
    source = edited("llama")
    for name in ("sliding_window", "attention_chunk_size"):
        source.edit({name: 4})
        assert f"{name}: attention to the last 4 tokens only" in source.result()
        source.edit({name: 4, "use_sliding_window": False})
        assert source.result() is source.unedited[1]


def test_fields_that_transformers_misreads_cause_a_warning(edited):
    source = edited("mamba2")
    source.edit({"rescale_prenorm_residual": True})
    said = []
    checked(open_local(CheckpointFiles(source.directory), warn=said.append))
    assert len(said) == 1 and "rescale_prenorm_residual" in said[0]


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_scaled_rotary_embeddings_are_exported_and_saved(edited, family):
    source = edited(family)
    linear = {"rope_type": "linear", "factor": 2.5}
    for rope in (linear, YARN, {**YARN, "truncate": False, "attention_factor": 0.7}):
        source.edit({"rope_parameters": {"rope_theta": 77.0, **rope}})
        config = source.opened().config
        assert from_json(to_json(config)) == config
        exported = json.dumps(hf_config(config, "float32"))
        (source.directory / "config.json").write_text(exported)
        assert source.opened().config == config


def test_greedy_text_with_yarn(edited):
    """Each token is the choice of transformers after the tokens before it."""
    source = edited("llama")
    source.edit({"rope_parameters": {"rope_theta": 77.0, **YARN}})
    model, prompt = stree_jax.load(source.directory), TOKENS[:9].tolist()
    options = {"max_new_tokens": 24, "stop_tokens": ()}
    tokens = stree_jax.generate(model, [prompt], **options).tokens[0]
    other = AutoModelForCausalLM.from_pretrained(source.directory, dtype="float32")
    with torch.no_grad():
        rows = other.eval()(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == rows[len(prompt) - 1 : -1].argmax(-1).tolist()
