"""Test that a wrong model path gives a message that says what to pass or do instead."""

import shutil
from pathlib import Path

import pytest

import stree_jax
from stree_jax.cli import main as cli
from tests.support.table_models import byte_level, padded_size, write_gguf, write_llama

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def model(tmp_path):
    tokenizer = byte_level()
    return write_llama(tmp_path / "model", padded_size(tokenizer), tokenizer=tokenizer)


def refused(path):
    with pytest.raises(stree_jax.CheckpointError) as error:
        stree_jax.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_inside_a_model_directory(model, name):
    assert refused(model / name).endswith(f"pass its directory, {model}")


def test_the_parent_directory_of_a_model(model):
    assert refused(model.parent).endswith(f"such as {model}")


def test_a_directory_of_the_hub_cache(model, tmp_path):
    snapshot = tmp_path / "models--o--n/snapshots/abc"
    shutil.copytree(model, snapshot)
    assert refused(tmp_path / "models--o--n").endswith(f"such as {snapshot}")


def test_weights_without_a_config(model):
    (model / "config.json").unlink()
    assert "weights, but no config.json" in refused(model)


def test_shards_without_their_index(model):
    for i in (1, 2):
        shutil.copy(
            model / "model.safetensors", model / f"model-0000{i}-of-00002.safetensors"
        )
    (model / "model.safetensors").unlink()
    said = refused(model)
    assert "model-00001-of-00002.safetensors is a shard, without the index" in said


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/o/n",
        "https://huggingface.co/o/n/tree/main",
        "huggingface.co/o/n",
        "hf.co/o/n",
        "o/n/tree/main",
        "https://huggingface.co/o/n?library=transformers",
    ],
)
def test_the_url_of_a_hub_page(name):
    assert refused(name).endswith("for the hub, pass the id o/n")


def test_an_unexpanded_home_directory():
    assert "~ is not expanded" in refused("~/no/such/model")


def test_a_missing_gguf_file(tmp_path):
    for name in ("a.gguf", "A.GGUF"):
        assert "no such file" in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_in_place_of_a_file(model, tmp_path, capsys, name):
    """`git clone` without Git LFS leaves a pointer of a few lines in place of each
    file."""
    (model / name).write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(model)
    assert cli.main(["convert", str(model), str(tmp_path / "out")]) == 2
    assert "git lfs pull" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_git_lfs_pointer_in_place_of_pytorch_weights(model):
    pytest.importorskip("torch")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(model)


def test_a_git_lfs_pointer_in_place_of_a_gguf_file(tmp_path):
    tokenizer, file = byte_level(), tmp_path / "model.gguf"
    write_gguf(file, tokenizer, [2] * padded_size(tokenizer), eos="</s>")
    assert stree_jax.load(file).config.vocab_size == padded_size(tokenizer)
    file.write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(file)


def test_a_pickle_with_other_objects_than_tensors(model):
    """The message does not repeat PyTorch's advice to execute the code in the file."""
    torch = pytest.importorskip("torch")
    (model / "model.safetensors").unlink()
    torch.save({"model": Path("x")}, model / "pytorch_model.bin")
    said = refused(model)
    assert "it contains more than tensors" in said and "weights_only" not in said
