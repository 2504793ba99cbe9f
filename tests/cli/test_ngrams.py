"""`stree-jax ngrams`, and what drafts with its file."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import perturbed, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a drafter that is right now and then, and its n-grams."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size, model = tokenizer.get_vocab_size(), tiny(1)
    table = np.random.default_rng(1).standard_normal((size, model.config.d_model))
    params = {**model.params, "embedding": table.astype(np.float32)}
    config = dataclasses.replace(
        model.config, vocab_size=size, num_tokens=size, stop_tokens=()
    )
    right = perturbed(params, 0.02, 3)
    for name, weights in (("target", params), ("drafter", right)):
        stree_jax.save(stree_jax.Model(weights, config, tokenizer), path / name)
    options = ["--tokens", "512", "--batch", "2", "--slots", "1024", "--seed", "3"]
    options += ["--drafter", path / "drafter", "--out", path / "n.safetensors"]
    assert cli.main([str(word) for word in ("ngrams", *options)]) == 0
    return path


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def generate(folder, *options):
    model = ["--model", folder / "target", "--max-new-tokens", "12", "--json"]
    return ["generate", "def f", *model, *options]


def test_ngrams_guess_for_a_drafter_and_draft_alone(folder, capsys):
    pair = ["--drafter", folder / "drafter", "--tree", "chain:3"]
    staged = ["--ngrams", folder / "n.safetensors", "--ngram-levels", "1", "--compare"]
    code, out, _ = run(capsys, *generate(folder, *pair))
    alone = json.loads(out)
    code, out, err = run(capsys, *generate(folder, *pair, *staged))
    together = json.loads(out)
    assert code == 0 and together["equal_to_plain"] is True
    assert together["tokens"] == alone["tokens"]
    assert together["target_calls"] == alone["target_calls"]
    names = set(together["tokens_by_origin"])
    assert {"target", "drafter", "n-gram"} <= names
    code, out, err = run(
        capsys, *generate(folder, *pair, *staged, "--ngram-width", "2")
    )
    wide = json.loads(out)
    assert code == 0 and wide["equal_to_plain"] is True
    assert wide["tokens"] == alone["tokens"]
    for told, lookups in ((together, 1), (wide, 2)):  # another token is another lookup
        passes = {stage["stage"]: stage["passes"] for stage in told["traffic"]}
        assert passes["n-gram"] == lookups * passes["drafter"]
    file = ["--drafter", folder / "n.safetensors"]
    code, out, err = run(capsys, *generate(folder, *file))
    assert code == 0 and json.loads(out)["tokens"] == alone["tokens"]


def test_a_table_is_described(folder, capsys):
    code, out, _ = run(capsys, "info", folder / "n.safetensors", "--json")
    found = json.loads(out)
    assert (code, found["format"], found["order"]) == (0, "n-grams", 3)
    assert found["temperature"] == 1.5 and len(found["slots"]) == 2


def test_the_recipe_is_the_whole_of_a_table(folder, capsys, tmp_path):
    first = stree_jax.load_drafter(folder / "n.safetensors")
    assert (first.order, first.temperature) == (3, 1.5)
    options = ["--tokens", "512", "--batch", "2", "--slots", "1024"]
    for seed, same in (("3", True), ("4", False)):
        out = tmp_path / f"{seed}.safetensors"
        words = [*options, "--seed", seed, "--drafter", folder / "drafter"]
        assert run(capsys, "ngrams", *words, "--out", out)[0] == 0
        pairs = zip(
            *map(jax.tree.leaves, (first, stree_jax.load_drafter(out))), strict=True
        )
        assert all(np.array_equal(a, b) for a, b in pairs) is same


def test_steps_with_guesses_and_without_are_tuned(folder, capsys):
    words = ["--drafter", folder / "drafter", "--ngrams", folder / "n.safetensors"]
    more = ["--model", folder / "target", "--tree", "auto:1,4"]
    code, out, err = run(capsys, "tune", *more, *words)
    assert code == 0 and "each further level: " in out
    (said,) = [line for line in err.splitlines() if "n-grams" in line]
    assert "guess for the drafter: " in said and " levels a pass expected" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--order", "1"], "order: want 2..8, got 1"),
        (["--slots", "1000"], "slots: want a power of two, got 1000"),
        (["--tokens", "0"], "tokens: want 1"),
        (["--temperature", "nan"], "temperature: want 0.01..100, got nan"),
        (["--drafter", "/nowhere"], "/nowhere: no such directory"),
        (["--out", "/nowhere/n"], "/nowhere: no such directory"),
    ],
)
def test_bad_recipes_are_one_line(folder, capsys, tmp_path, words, message):
    given = {"--drafter": str(folder / "drafter"), "--out": str(tmp_path / "n")}
    given |= dict([words])
    options = [word for item in given.items() for word in item]
    code, out, err = run(capsys, "ngrams", *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert not any(tmp_path.iterdir())


def test_a_table_that_is_there_is_not_written_over(folder, capsys):
    file = folder / "n.safetensors"
    words = ["--drafter", folder / "drafter", "--out", file]
    code, _, err = run(capsys, "ngrams", *words)
    assert (code, err.count("\n")) == (2, 1) and "exists already" in err


@pytest.mark.parametrize("option", ["--ngram-levels", "--ngram-width"])
@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["tune"], ["serve"]])
def test_how_ngrams_guess_is_asked_of_ngrams(command, option, capsys):
    code, out, err = run(capsys, *command, option, "2")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"{option}: needs n-grams; add --ngrams FILE" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--ngrams", "N", "--drafter", "lookup"],
            "proposes tokens for a draft model;",
        ),
        (["--ngrams", "N", "--drafter", "none"], "proposes tokens for a draft model;"),
        (["--ngrams", "N", "--drafter", "N"], "for a draft model, not n-grams"),
        (["--ngrams", "D", "--drafter", "D"], "no such file"),
        (["--ngrams", "T", "--drafter", "D"], "no n-gram table"),
        (
            ["--ngrams", "N", "--drafter", "D", "--ngram-levels", "0"],
            "--ngram-levels: want 1..15",
        ),
        (
            ["--ngrams", "N", "--drafter", "D", "--ngram-width", "0"],
            "--ngram-width: want 1..16",
        ),
        (
            ["--ngrams", "N", "--drafter", "D", "--ngram-width", "17"],
            "--ngram-width: want 1..16",
        ),
        (["--ngrams", "N", "--drafter", "D", "--tree", "beam:2x2"], "beams and 'auto'"),
        (["--drafter", "N", "--tree", "auto"], "beams and 'auto' want a model"),
        (["--drafter", "N", "--rule", "mss", "--temperature", "1"], "n-grams"),
    ],
)
def test_what_does_not_go_with_ngrams_is_one_line(folder, capsys, words, message):
    places = {
        "N": folder / "n.safetensors",
        "D": folder / "drafter",
        "T": folder / "drafter" / "tokenizer.json",
    }
    words = [places.get(word, word) for word in words]
    code, out, err = run(capsys, *generate(folder, *words))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
