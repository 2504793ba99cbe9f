"""`stree-jax heads`, and what drafts with its directory."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.training import heads as training
from stree_jax.training import hidden_state_files as kept
from stree_jax.training.corpus import train_tokenizer
from stree_jax.training.ngrams import count_grams, katz
from tests.support.tiny import tiny

SIZES = "--heads 2 --steps 6 --batch 4 --length 16 --tokens 4000 --own-tokens 1000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of one layer, prepared tokens, and heads of the target."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size, model = tokenizer.get_vocab_size(), tiny(1, layers=("mamba",))
    table = np.random.default_rng(1).standard_normal((size, model.config.d_model))
    params = {**model.params, "embedding": table.astype(np.float32)}
    config = dataclasses.replace(
        model.config, vocab_size=size, num_tokens=size, stop_tokens=(0,)
    )
    stree_jax.save(stree_jax.Model(params, config, tokenizer), path / "target")
    text = np.random.default_rng(0).integers(0, size, (2, 90), np.int32)
    table = katz(count_grams(text, 2, size), size, slots=64, keep=2)
    stree_jax.save_drafter(table, path / "n.safetensors")
    (path / "text").mkdir()
    tokenizer.save(str(path / "text" / "tokenizer.json"))
    rng = np.random.default_rng(2)
    for name, count in (("train", 6000), ("heldout", 2000)):
        np.save(path / "text" / f"{name}.npy", rng.integers(1, size, count, np.uint16))
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(training, "HELD_OUT", 4)
        assert cli.main(words(path)) == 0
    return path


def words(folder, *more, **places):
    """The command, with other places and options behind it."""
    names = {"target": "target", "text": "text", "out": "heads", "work": "work"}
    given = {name: folder / path for name, path in names.items()} | places
    options = [word for name, path in given.items() for word in (f"--{name}", path)]
    return [str(word) for word in ["heads", *options, *SIZES.split(), *more]]


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def generate(folder, *options):
    model = ["--model", folder / "target", "--max-new-tokens", "12"]
    return ["generate", "def f", *model, "--drafter", folder / "heads", *options]


def test_heads_are_trained_and_written(folder):
    heads = stree_jax.load_drafter(folder / "heads")
    assert (heads.config.heads, heads.config.blocks) == (2, 3)
    assert not heads.config.own_output
    assert np.shape(heads.config.accuracy) == (2, training.RANKS)
    fields = json.loads((folder / "heads" / "config.json").read_text())
    assert fields["base_model_name_or_path"] == str(folder / "target")
    assert {file.name for file in (folder / "work").iterdir()} >= {"saves"}


def test_the_same_command_ends_with_the_same_heads(folder, capsys, tmp_path):
    """From its save, without a step."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(training, "HELD_OUT", 4)
        code, _, err = run(capsys, *words(folder, out=tmp_path / "again"))
    assert code == 0, err
    assert (
        "going on from step 6" in err and f"wrote {tmp_path / 'again'}: Heads(2" in err
    )
    assert "head 1: first guess " in err
    for name in ("medusa_lm_head.safetensors", "config.json"):
        first = (folder / "heads" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == first


def test_they_draft_the_targets_own_text(folder, capsys):
    code, out, _ = run(capsys, *generate(folder, "--compare"))
    assert code == 0 and "output identical" in out
    assert "not the target's" not in out
    code, out, _ = run(capsys, *generate(folder, "--json", "--tree", "cartesian:3x2"))
    report = json.loads(out)
    assert code == 0 and report["promise"] == "tokens"
    assert set(report["calls_by_tree_size"]) == {"10"}


def test_typical_text_is_said_not_to_be_the_targets(folder, capsys):
    """In the closing line, with --compare, and in the field "promise" of --json."""
    hot = ["--temperature", "1", "--rule", "typical"]
    code, out, _ = run(capsys, *generate(folder, *hot))
    assert code == 0
    unlike = "not the target's distribution (rule typical)"
    assert unlike in out.splitlines()[-1]
    code, out, _ = run(capsys, *generate(folder, *hot, "--compare"))
    assert code == 0 and "not the distribution of plain decoding" in out
    assert "same distribution" not in out and "identical" not in out
    code, out, _ = run(capsys, *generate(folder, *hot, "--compare", "--json"))
    report = json.loads(out)
    assert (code, report["promise"], report["equal_to_plain"]) == (0, "nothing", None)
    code, out, _ = run(capsys, *generate(folder, *hot[:2], "--rule", "mss", "--json"))
    assert json.loads(out)["promise"] == "distribution"
    code, out, _ = run(capsys, *generate(folder, *hot[:2]))
    assert code == 0 and "not the target's" not in out


@pytest.mark.parametrize(("rule", "said"), [("typical", True), ("naive", False)])
def test_a_chat_says_so_too(folder, capsys, monkeypatch, rule, said):
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    pair = ["--model", folder / "target", "--drafter", folder / "heads"]
    code, _, err = run(capsys, "chat", *pair, "--temperature", 1, "--rule", rule)
    assert code == 0
    note = "rule typical: answers do not follow the model's distribution"
    assert (note in err) is said


def refused(capsys, *args):
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--tokens", "0"], "--tokens: want at least 1, got 0"),
        (["--own-tokens", "-1"], "--own-tokens: want at least 0, got -1"),
        (["--length", "193"], "--length: want 3..192 tokens for 2 heads, got 193"),
        (["--length", "2"], "--length: want 3..192 tokens for 2 heads, got 2"),
        (["--length", "513", "--own-tokens", "0"], "--length: want 3..512"),
        (["--length", "0"], "length: want at least 1, got 0"),
        (["--heads", "0"], "heads: want 1..64, got 0"),
        (["--heads", "65", "--length", "99"], "heads: want 1..64, got 65"),
        (["--blocks", "-1"], "blocks: want 0..16, got -1"),
        (["--blocks", "0"], "blocks: with 0 blocks"),
        (["--steps", "0"], "steps: want at least 1, got 0"),
        (["--batch", "0"], "batch: want at least 1, got 0"),
        (["--minutes", "0"], "minutes: want more than 0, got 0"),
        (["--save-minutes", "-1"], "save_minutes: want more than 0, got -1"),
        (["--target", "/nowhere"], "/nowhere: no such directory"),
        (["--out", "/nowhere/at/all"], "/nowhere/at: no such directory"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(
    folder, capsys, tmp_path, more, problem
):
    places = dict(out=tmp_path / "out", work=tmp_path / "work")
    assert problem in refused(capsys, *words(folder, *more, **places))
    assert not any(tmp_path.iterdir())


def test_heads_that_are_there_are_not_written_over(folder, capsys, tmp_path):
    before = (folder / "heads" / "config.json").read_bytes()
    err = refused(capsys, *words(folder, work=tmp_path / "work"))
    assert "heads: exists already" in err and not any(tmp_path.iterdir())
    assert (folder / "heads" / "config.json").read_bytes() == before


def test_the_work_of_other_heads_is_refused(folder, capsys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(training, "HELD_OUT", 4)
        for more, problem in (
            (["--heads", "3"], "saves of a run with another heads"),
            (["--seed", "3"], "saves of a run with another seed"),
            (["--tokens", "5500"], "of another target, text or size"),
        ):
            code, out, err = run(capsys, *words(folder, *more, out=tmp_path / "out"))
            assert code == 2 and problem in err.splitlines()[-1]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ngrams", "N"], "proposes tokens for a draft model, not Medusa heads"),
        (["--ngram-levels", "2"], "--ngram-levels: needs n-grams"),
        (["--ngram-width", "2"], "--ngram-width: needs n-grams"),
        (["--tree", "beam:2x2"], "heads fill a fixed tree"),
        (["--tree", "E"], "5 levels want as many heads, and there are 2"),
        (["--tree", "sparse:0"], "sparse:N wants N in 2..1024, got '0'"),
        (["--rule", "typical"], "--rule: greedy decoding draws nothing"),
        (
            ["--rule", "typical/iid", "--temperature", "1"],
            "typical takes drafts by top_k",
        ),
        (["--model", "H"], "not supported"),
        (["--model", "demo"], "heads: of states 32 wide"),
    ],
)
def test_what_does_not_go_with_heads_is_one_line(folder, capsys, options, problem):
    table = folder / "n.safetensors"
    if not table.exists():
        from stree_jax.training.ngrams import count_grams, katz

        text = np.random.default_rng(0).integers(0, 40, (2, 90), np.int32)
        stree_jax.save_drafter(
            katz(count_grams(text, 2, 40), 40, slots=64, keep=2), table
        )
    places = {"N": table, "H": folder / "heads"}
    options = [places.get(word, word) for word in options]
    assert problem in refused(capsys, *generate(folder, *options))


def test_heads_are_described(folder, capsys):
    code, out, _ = run(capsys, "info", "demo-heads", "--json")
    found = json.loads(out)
    assert (code, found["format"], found["heads"]) == (0, "Medusa heads", 4)
    assert found["parameters"] > 1_770_000
    said = refused(capsys, "info", "demo-heads", "--draft-vocab", 9)
    assert "draft vocabulary: for MTP layers, EAGLE, block" in said


def test_heads_are_no_model(folder, capsys, tmp_path):
    """Where one is wanted: to convert, export, and to count."""
    heads = folder / "heads"
    for command in (
        ["convert", heads, tmp_path / "out"],
        ["export", heads, tmp_path / "out"],
        ["ngrams", "--drafter", heads, "--out", tmp_path / "n"],
    ):
        assert str(heads) in refused(capsys, *command)
    assert not any(tmp_path.iterdir())
