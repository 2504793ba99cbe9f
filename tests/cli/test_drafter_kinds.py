"""Test that a kind of drafter is one object: a toy kind goes through every command."""

import json

import chex
import pytest

import stree_jax
from stree_jax.checkpoints.kinds.table import KINDS
from stree_jax.cli import main as cli
from stree_jax.cli.commands import serve
from tests.support.toy_kind import LISTED, Bigrams, bigrams

TEXT = "def f(x):\n    return x\n\n\ndef g(x):\n    return f(x)\n"


@pytest.fixture(scope="module", autouse=True)
def registered():
    KINDS.insert(0, LISTED)
    yield
    KINDS.remove(LISTED)


@pytest.fixture(scope="module")
def target():
    return stree_jax.load("demo")


@pytest.fixture(scope="module")
def toy(target):
    ids = target.tokenizer.encode(TEXT).ids
    return bigrams(ids, target.config.vocab_size)


@pytest.fixture(scope="module")
def path(toy, tmp_path_factory):
    path = tmp_path_factory.mktemp("toys") / "toy"
    stree_jax.save_drafter(toy, path)
    return path


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_it_is_saved_and_loaded(toy, path, target):
    found = stree_jax.load_drafter(path, target)
    assert isinstance(found, Bigrams)
    chex.assert_trees_all_equal(found, toy)
    with pytest.raises(stree_jax.CheckpointError, match="exists already"):
        stree_jax.save_drafter(toy, path)


def test_it_is_described_and_planned(path, capsys):
    found = run(capsys, "info", path, "--json", "--draft-vocab", 9)
    assert found == {"format": "toy bigrams", "tokens": 9}
    words = "--memory", "1GB", "--context", 256, "--json"
    for more in ((), ("--draft-vocab", 64)):
        plan = run(capsys, "plan", "--drafter", path, *words, *more)
        assert "drafter" in {choice["drafter"] for choice in plan["choices"]}


def test_it_drafts(path, toy, target, capsys, tmp_path):
    words = "--drafter", path, "--max-new-tokens", 8, "--json"
    for more in ((), ("--draft-vocab", 900), ("--memory", "1GB")):
        found = run(capsys, "generate", "def f(x):", *words, "--compare", *more)
        assert found["equal_to_plain"] is True
    parse = cli.build_parser().parse_args
    _, spec, *_ = serve.loaded(parse(["serve", "--drafter", str(path)]))
    chex.assert_trees_all_equal(spec.drafter.value, toy)
    (tmp_path / "text").write_text(TEXT)
    checked = run(
        capsys, "check-drafter", "--text", tmp_path / "text", *words[:2], "--json"
    )
    assert checked["by_position"][0][0] > 0.1


def test_a_damaged_file_is_one_line(tmp_path, capsys):
    (tmp_path / "toy.json").write_text('{"size": "many"}')
    assert cli.main(["generate", "x", "--drafter", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "want a number, got 'many'" in err


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ("lookup", "prompt lookup has no files to write"),
        ("mtp", "MTP layers has no files"),
        (None, "none has no files"),
        (3, "nothing to write, got 3"),
    ],
)
def test_drafters_without_files_are_not_saved(drafter, problem, tmp_path):
    with pytest.raises(stree_jax.CheckpointError, match=problem):
        stree_jax.save_drafter(drafter, tmp_path / "d")
    assert not any(tmp_path.iterdir())


def test_load_drafter_takes_every_name():
    assert stree_jax.load_drafter("lookup") == "lookup"
    assert stree_jax.load_drafter("mtp") == "mtp"
    assert stree_jax.load_drafter("none") is None
    model = stree_jax.load_drafter("demo", dtype="bfloat16")
    assert model.config == stree_jax.load("demo-drafter").config
    assert stree_jax.load_drafter("demo-heads").config.heads == 4
