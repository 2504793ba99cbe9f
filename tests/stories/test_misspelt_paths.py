"""A path that leads to no model: the message says what to name, or to do, instead."""

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
def test_a_file_of_a_model(model, name):
    assert refused(model / name).endswith(f"name its directory, {model}")


def test_the_folder_above(model):
    assert refused(model.parent).endswith(f"such as {model}")


def test_a_folder_of_the_hubs_cache(model, tmp_path):
    snapshot = tmp_path / "models--o--n/snapshots/abc"
    shutil.copytree(model, snapshot)
    assert refused(tmp_path / "models--o--n").endswith(f"such as {snapshot}")


def test_weights_alone(model):
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
def test_the_address_of_a_page(name):
    assert refused(name).endswith("of the hub, name o/n")


def test_a_home_that_no_shell_has_put_in():
    assert "~ is not replaced" in refused("~/no/such/model")


def test_a_missing_gguf_file(tmp_path):
    for name in ("a.gguf", "A.GGUF"):
        assert "no such file" in refused(tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_clone_without_its_large_files(model, tmp_path, capsys, name):
    """`git clone` without Git LFS leaves a few lines in place of each."""
    (model / name).write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(model)
    assert cli.main(["convert", str(model), str(tmp_path / "out")]) == 2
    assert "git lfs pull" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_clone_with_pickled_weights(model):
    pytest.importorskip("torch")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(model)


def test_a_gguf_file_of_a_clone(tmp_path):
    tokenizer, file = byte_level(), tmp_path / "model.gguf"
    write_gguf(file, tokenizer, [2] * padded_size(tokenizer), eos="</s>")
    assert stree_jax.load(file).config.vocab_size == padded_size(tokenizer)
    file.write_text(POINTER)
    assert "fetch it with git lfs pull" in refused(file)


def test_a_pickle_of_more_than_tensors(model):
    """torch's advice to run the code that is in it is not passed on."""
    torch = pytest.importorskip("torch")
    (model / "model.safetensors").unlink()
    torch.save({"model": Path("x")}, model / "pytorch_model.bin")
    said = refused(model)
    assert "it contains more than tensors" in said and "weights_only" not in said
