"""Commands with published drafters of the bundled target, with random weights."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.training.ngrams import count_grams, katz
from tests.support.published_drafters import write_drafter

SIZES = dict(d=384, vocab=2048, target_layers=6, boundaries=(2, 3, 5), draft_vocab=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafters")
    for layout in ("liquid", "redhat-dspark", "speculators-eagle3", "z-lab-flat"):
        write_drafter(path / layout, layout, target="o/target", **SIZES)
    text, V = np.arange(400)[None] * 7 % SIZES["vocab"], SIZES["vocab"]
    ngrams = katz(count_grams(text, 2, V), V, slots=1024, keep=2)
    stree_jax.save_drafter(ngrams, path / "n.safetensors")
    return path


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def failure(capsys, *args):
    """Returns the only line that a failing command writes."""
    code, out, err = run(capsys, *args)
    assert code and out == "" and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("layout", ["liquid", "redhat-dspark", "speculators-eagle3"])
def test_info_and_plan(layout, folder, capsys):
    code, out, _ = run(capsys, "info", folder / layout, "--json")
    found = json.loads(out)
    assert code == 0 and found["boundaries"] == [2, 3, 5]
    assert found["target"] == (None if layout == "liquid" else "o/target")
    code, out, _ = run(capsys, "info", folder / layout)
    assert code == 0 and "boundaries" in out and "memory" not in out
    options = "--memory", "1GB", "--drafter", folder / layout, "--json"
    code, out, _ = run(capsys, "plan", *options)
    choices = json.loads(out)["choices"]
    name = "eagle" if "eagle" in layout else "block drafter"
    assert code == 0 and name in {choice["drafter"] for choice in choices}


def test_info_shows_the_draft_vocabulary(folder, capsys):
    shown = {"liquid": "all 2,048 tokens", "redhat-dspark": "512 of 2,048 tokens"}
    for layout, text in shown.items():
        assert text in run(capsys, "info", folder / layout)[1]
    options = folder / "liquid", "--draft-vocab", 256
    assert "256 of 2,048 tokens" in run(capsys, "info", *options)[1]
    found = [
        json.loads(run(capsys, "info", folder / "liquid", *more, "--json")[1])
        for more in ((), ("--draft-vocab", 256))
    ]
    # A head of its own, and fewer rows of the pair scores
    added = 2 * 256 * SIZES["d"] - 2 * (2048 - 256) * 16
    assert found[1]["weight_bytes"] - found[0]["weight_bytes"] == added
    said = failure(capsys, "info", folder / "speculators-eagle3", "--draft-vocab", 600)
    assert "the drafter's head has only 512 tokens" in said
    assert "is a model, not a drafter" in failure(
        capsys, "info", "demo", "--draft-vocab", 5
    )


def test_text_is_that_of_plain_decoding(folder, capsys):
    options = "--max-new-tokens", 6, "--json", "--memory", "1GB"
    ngrams = "--ngrams", folder / "n.safetensors"
    texts = [
        json.loads(run(capsys, "generate", "def", "--drafter", *words, *options)[1])
        for words in (["none"], [folder / "liquid"], [folder / "z-lab-flat", *ngrams])
    ]
    assert texts[0]["text"] == texts[1]["text"] == texts[2]["text"]


def test_wrong_input_is_one_line(folder, capsys, tmp_path):
    generate = "generate", "def", "--max-new-tokens", 4, "--drafter"
    ngrams = "--ngrams", folder / "n.safetensors"
    assert "no such" in failure(capsys, *generate, tmp_path / "absent")
    drafter = folder / "liquid"
    said = failure(capsys, "info", drafter, "--figure", tmp_path / "f")
    assert "is a drafter, not a model" in said
    said = failure(capsys, *generate, drafter, "--ngrams", tmp_path / "absent")
    assert said.startswith("stree-jax: ")
    for name, message in (
        ("liquid", "--ngrams: this DSpark drafter scores pairs of tokens itself"),
        ("speculators-eagle3", "for a DFlash drafter only, got Eagle(EAGLE-3"),
    ):
        assert message in failure(capsys, *generate, folder / name, *ngrams)
    said = failure(
        capsys, *generate, folder / "z-lab-flat", *ngrams, "--ngram-levels", 2
    )
    assert "--ngram-levels: for n-grams of a draft model only" in said
    assert "block has 4" in failure(capsys, *generate, drafter, "--tree", "chain:5")
    other = tmp_path / "other"
    write_drafter(other, "liquid", **SIZES | {"target_layers": 8})
    assert "target of 8 layers" in failure(capsys, *generate, other)
    said = failure(capsys, "generate", "def", "--model", drafter)
    assert "a drafter, not a model; pass it as the drafter" in said


def test_copies_of_the_target_are_left_out(tmp_path):
    target = stree_jax.load("demo")
    table = np.asarray(target.params["embedding"], np.float64)
    write_drafter(tmp_path / "d", "deepspec", embed=table, head=table, **SIZES)
    config = stree_jax.load_drafter(tmp_path / "d", target=target).config
    assert not config.own_embedding and config.head_rows == 0
    assert stree_jax.load_drafter(tmp_path / "d").config.own_embedding
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    tensors["embed_tokens.weight"][7] += 1
    save_file(tensors, file)
    config = stree_jax.load_drafter(tmp_path / "d", target=target).config
    assert config.own_embedding and config.head_rows == 0
