"""Test configs that tie the output head to the embedding, with files that differ.

If the two tensors differ, transformers 5.24 keeps both and warns. It ties equal
tensors. If the file has only the head, it is used as the embedding too.
"""

import json
import warnings

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from tests.support import hf_checkpoints as hf
from tests.support.checkpoints import edit_json, edit_tensors
from tests.support.families import mesh_of

TOKENS = np.arange(12)[None] * 7 % hf.VOCAB
TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "mamba2": hf.mamba2,
    "llama": hf.llama,
    "qwen2": hf.qwen2,
    "qwen3": hf.qwen3,
    "mistral": hf.mistral,
    "granite": hf.granite,
    "bamba": hf.bamba,
    "falcon": hf.falcon,
    "zamba2": hf.zamba,
    "nemotron": hf.nemotron,
    "qwen3_5": hf.qwen3_5,
}
EMBEDDINGS = ("model.embed_tokens.weight", "backbone.embeddings.weight")


def embedding_of(tensors):
    return next(name for name in EMBEDDINGS if name in tensors)


def different_head(tensors):
    embedding = tensors[embedding_of(tensors)]
    tensors["lm_head.weight"] = embedding.flip(0).contiguous()


def equal_head(tensors):
    tensors["lm_head.weight"] = tensors[embedding_of(tensors)].clone()


def head_only(tensors):
    tensors["lm_head.weight"] = tensors.pop(embedding_of(tensors))


def write(directory, make, change):
    make(**TIED).save_pretrained(directory)
    edit_json(directory / "config.json", lambda values: values.update(TIED))
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def their_logits(directory):
    other, report = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert not report["missing_keys"]
    with torch.no_grad():
        return other.float().eval()(torch.from_numpy(TOKENS)).logits.numpy()


def close(directory, model):
    ours, theirs = np.asarray(stree_jax.score(model, TOKENS)), their_logits(directory)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def load(directory):
    """Returns the model and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = stree_jax.load(directory)
    return model, [str(w.message) for w in said]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_unlike_the_embedding_is_kept(tmp_path, family):
    """Loading succeeds with one line of warning that names both tensors."""
    directory = write(tmp_path / "model", FAMILIES[family], different_head)
    model, said = load(directory)
    assert not model.config.tie_embeddings and not info(directory)["tied_head"]
    [line] = said
    assert "lm_head.weight" in line and "embed" in line and "\n" not in line
    close(directory, model)


@pytest.mark.parametrize("change", [equal_head, head_only])
def test_equal_or_missing_tensors_are_tied(tmp_path, change):
    directory = write(tmp_path / "model", hf.llama, change)
    model, said = load(directory)
    assert said == [] and "lm_head" not in model.params
    assert info(directory)["tied_head"]
    close(directory, model)


def test_equal_tensors_are_tied_despite_dtype_and_nan(tmp_path):
    """A NaN row, as in padding, is equal to its copy."""

    def change(tensors):
        name = embedding_of(tensors)
        table = tensors[name].bfloat16()
        table[-1] = torch.nan
        tensors[name], tensors["lm_head.weight"] = table, table.float()

    directory = write(tmp_path / "model", hf.llama, change)
    assert stree_jax.load(directory).config.tie_embeddings


def test_an_untied_head_survives_every_conversion(tmp_path, capsys):
    """convert (checked by --verify), export, save, bfloat16, int8 and a mesh."""
    src = write(tmp_path / "src", hf.llama, different_head)
    ours, out = str(tmp_path / "ours"), tmp_path / "hf"
    assert cli.main(["convert", str(src), ours, "--verify"]) == 0
    assert "lm_head.weight" in capsys.readouterr().err
    assert cli.main(["export", ours, str(out)]) == 0
    assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert their_logits(out).tolist() == their_logits(src).tolist()
    model, said = load(ours)
    assert said == [] and not info(ours)["tied_head"]
    stree_jax.save(model, tmp_path / "saved")
    head = np.asarray(load_file(src / "model.safetensors")["lm_head.weight"])
    for path in (ours, tmp_path / "saved", out):
        assert np.array_equal(load(path)[0].params["lm_head"], head)
    with pytest.warns(UserWarning, match="lm_head"):
        cut = stree_jax.load(src, mesh=mesh_of("1x1"))
    assert np.array_equal(jax.device_get(cut.params["lm_head"]), head)
    with pytest.warns(UserWarning, match="lm_head"):
        assert "lm_head" in stree_jax.load(src, dtype="int8").params


def test_a_pytorch_file_with_both_names(tmp_path):
    """pytorch_model.bin of a tied model has both names for the same storage."""
    src = write(tmp_path / "src", hf.llama, equal_head)
    tensors = load_file(src / "model.safetensors")
    (src / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors[embedding_of(tensors)]
    torch.save(tensors, src / "pytorch_model.bin")
    model, said = load(src)
    assert said == [] and model.config.tie_embeddings
    edit_tensors(src, different_head)
    model, said = load(src)
    assert len(said) == 1 and not model.config.tie_embeddings


@pytest.mark.parametrize("family", ["llama", "mamba2", "zamba2"])
def test_a_model_saved_without_its_head(tmp_path, family):
    """AutoModel saves it without the head, and without the common prefix of all
    names."""
    other = FAMILIES[family](**TIED)
    other.base_model.save_pretrained(tmp_path / "model")
    model, said = load(tmp_path / "model")
    assert said == [] and model.config.tie_embeddings
    close(tmp_path / "model", model)


def test_a_missing_untied_head_is_refused(tmp_path, capsys):
    """transformers would initialize such a head at random."""
    src = write(tmp_path / "src", hf.llama, lambda tensors: None)
    untied = {"tie_word_embeddings": False}
    edit_json(src / "config.json", lambda values: values.update(untied))
    capsys.readouterr()
    assert cli.main(["convert", str(src), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert '"tie_word_embeddings" to true' in error and error.count("\n") == 1


def test_shared_blocks_with_different_weights(tmp_path):
    """Zamba2 shares transformer blocks. If the file has different weights, each is
    kept, as in transformers."""
    hf.zamba(tie_word_embeddings=False).save_pretrained(tmp_path / "src")
    edit_json(tmp_path / "src" / "config.json", lambda values: values.update(TIED))
    model, said = load(tmp_path / "src")
    assert model.config.shared.blocks == 3 and not model.config.tie_embeddings
    assert len(said) == 2
    close(tmp_path / "src", model)
