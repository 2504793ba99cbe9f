"""Test published Qwen2.5, Qwen3 and Mistral configs and their sliding windows.

A window that hides no tokens leaves the logits of transformers unchanged. With any
other, logits are those of transformers, and texts of trees are those of plain decoding.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError
from tests.support import hf_checkpoints as hf
from tests.support.checkpoints import edit_json, small_tokenizer

TOKENS = np.arange(20)[None] * 7 % hf.VOCAB
WINDOW = 6


def their_logits(directory, tokens=TOKENS):
    other = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        return other.float().eval()(torch.from_numpy(tokens)).logits.numpy()


def close(directory, wanted, tokens=TOKENS):
    ours = np.asarray(stree_jax.score(stree_jax.load(directory), tokens))
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)


def written(directory, make, **fields):
    """Writes a checkpoint whose config.json has these fields; None is written as
    null."""
    make().save_pretrained(directory)

    def change(values):
        # Older published configs lack it (it came with transformers 5)
        values.pop("layer_types", None)
        values.update(fields)

    edit_json(directory / "config.json", change)
    return directory


UNUSED = {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 0}
HIDES_NOTHING = {
    "qwen2 unused": (hf.qwen2, UNUSED),
    "qwen3 unused": (hf.qwen3, UNUSED),
    "qwen2 no layer": (
        hf.qwen2,
        UNUSED | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3 null": (
        hf.qwen3,
        UNUSED | {"use_sliding_window": True, "sliding_window": None},
    ),
    "qwen2 by name": (
        hf.qwen2,
        UNUSED | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ),
    "qwen3 long": (
        hf.qwen3,
        UNUSED
        | {"use_sliding_window": True, "sliding_window": 64}
        | {"max_position_embeddings": 64},
    ),
    "mistral null": (hf.mistral, {"sliding_window": None}),
    "mistral long": (
        hf.mistral,
        {"sliding_window": 64, "max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", HIDES_NOTHING)
def test_windows_that_hide_nothing_are_accepted(tmp_path, name):
    make, fields = HIDES_NOTHING[name]
    directory = written(tmp_path / "model", make, **fields)
    close(directory, their_logits(directory))


USED = UNUSED | {"use_sliding_window": True}
SLIDES = ["full_attention", "sliding_attention"]
NAMED = USED | {"layer_types": SLIDES, "max_window_layers": 1}
HIDES = {
    "mistral": (hf.mistral, {"sliding_window": WINDOW}),
    "qwen2": (hf.qwen2, USED),
    "qwen3": (hf.qwen3, USED),
    "qwen3 by name": (hf.qwen3, NAMED),
}


@pytest.mark.parametrize("name", HIDES)
def test_windows_that_hide_tokens(tmp_path, name):
    make, fields = HIDES[name]
    directory = written(tmp_path / "model", make, **fields)
    theirs = their_logits(directory)
    close(directory, theirs)
    edit_json(directory / "config.json", lambda values: values.update(NO_WINDOW))
    longer = np.asarray(stree_jax.score(stree_jax.load(directory), TOKENS))
    assert np.abs(longer - theirs)[:, WINDOW:].max() > 1e-3


NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
NO_WINDOW |= {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("name", ["mistral", "qwen3 by name"])
def test_texts_across_the_edge_of_a_window(tmp_path, name):
    """Trees whose nodes see different parts of the text decode as plain decoding."""
    make, fields = HIDES[name]
    model = stree_jax.load(written(tmp_path / "model", make, **fields))
    prompts = [TOKENS[0, :5].tolist(), TOKENS[0].tolist()]
    options = {"max_new_tokens": 3 * WINDOW, "stop_tokens": ()}
    plain = stree_jax.generate(model, prompts, drafter=None, **options)
    for drafter, tree in ((model, "A"), (model, "chain:7"), ("lookup", "chain:4")):
        other = stree_jax.generate(
            model, prompts, drafter=drafter, tree=tree, **options
        )
        assert other.tokens == plain.tokens
    text = np.array([prompts[1] + plain.tokens[1]])
    rows = np.asarray(stree_jax.score(model, text))[0, len(prompts[1]) - 1 : -1]
    assert rows.argmax(axis=-1).tolist() == plain.tokens[1]


def test_mistral_without_the_field_has_the_default_window(tmp_path):
    """The default of MistralConfig is 4096 tokens; published configs have null or a
    number."""
    hf.mistral().save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", lambda v: v.pop("sliding_window"))
    config = stree_jax.load(tmp_path / "model").config
    assert config.mixers["attention"].window == 4096


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_mistral_instruct_with_consolidated_weights(tmp_path, capsys):
    """Files in Mistral's own format, with other tensor names, are ignored."""
    directory = tmp_path / "Mistral-7B-Instruct-v0.3"
    hf.mistral().save_pretrained(directory, max_shard_size="20KB")
    assert (directory / "model.safetensors.index.json").is_file()
    own = {"layers.0.attention.wq.weight": torch.zeros(24, 24)}
    save_file(own, directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps({"dim": 24, "n_layers": 2}))
    (directory / "tokenizer.model.v3").write_bytes(b"\n\x0e")
    small_tokenizer().save(str(directory / "tokenizer.json"))
    theirs = their_logits(directory)
    close(directory, theirs)
    assert info(directory)["format"] == "mistral"
    assert "mistral" in run(capsys, "info", directory)
    run(capsys, "convert", directory, tmp_path / "ours", "--verify")
    run(capsys, "export", tmp_path / "ours", tmp_path / "hf")
    np.testing.assert_allclose(their_logits(tmp_path / "hf"), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [True, False])
def test_mistrals_own_format_alone_is_refused(tmp_path, config):
    """The message names the files that are needed in place of the raw weights."""
    directory = tmp_path / "raw"
    hf.mistral().save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    own = {"tok_embeddings.weight": torch.zeros(hf.VOCAB, 24)}
    save_file(own, directory / "consolidated.safetensors")
    (directory / "params.json").write_text("{}")
    if not config:
        (directory / "config.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        stree_jax.load(directory)
    assert "formats of Mistral and Meta" in str(refused.value)
    assert "model.safetensors" in str(refused.value)


def test_an_adapter_without_a_model_is_refused(tmp_path):
    """A PEFT directory has neither a config nor a complete model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="PEFT adapter.*--adapter"):
        stree_jax.load(tmp_path)


@pytest.mark.parametrize("make", [hf.qwen2, hf.qwen3])
def test_qwen_instruct(tmp_path, capsys, make):
    """Tied, in bfloat16, with the fields of Qwen's published configs."""
    fields = {"use_sliding_window": False, "sliding_window": 32768}
    fields |= {"max_window_layers": 2, "max_position_embeddings": 32768}
    model = make(tie_word_embeddings=True)
    model.bfloat16().save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", lambda v: v.update(fields))
    facts = info(tmp_path / "model")
    assert facts["tied_head"] and facts["dtype"] == "bfloat16"
    run(capsys, "convert", tmp_path / "model", tmp_path / "ours", "--verify")
    run(capsys, "export", tmp_path / "ours", tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert values["model_type"] == facts["format"] == model.config.model_type
    theirs = their_logits(tmp_path / "model")
    np.testing.assert_array_equal(their_logits(tmp_path / "hf"), theirs)
