"""`--drafter MODULE:NAME`: custom drafters from modules on Python's import path."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stree_jax
from stree_jax.checkpoints.kinds.custom import custom_drafter
from stree_jax.checkpoints.kinds.finding import is_custom
from stree_jax.checkpoints.pair import load_pair
from stree_jax.cli import main as cli
from stree_jax.cli.commands import serve

ROOT = Path(__file__).parent.parent.parent
MODULE = '''
"""Drafters for the bundled target."""

import numpy as np

from tests.support.toy_drafter import TwoTaps, two_taps

V, D = 2048, 384
ready = TwoTaps(np.zeros((V, V), np.float32), np.zeros((2, D, V), np.float32))


def make(target):
    return two_taps(target, [target.tokenizer.encode("def f(x): return x").ids])


class Own:
    """A drafter by its methods."""

    def __init__(self, target=None, *, other=1):
        self.target = target

    init = propose = commit = None


class Needs(Own):
    def __init__(self, model):
        self.target = model


class Keyword(Own):
    def __init__(self, *, target):
        self.target = target


class Nothing(Own):
    def __init__(self, size=3):
        self.target = size


class Outer:
    Inner = Own
    object = Nothing()


def two(target, size):
    return ready


def forgets(target):
    two(target, 3)


def name(target):
    return "lookup"


def fails(target):
    raise RuntimeError("no\\nluck")


number = 3
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes a module on the import path."""

    def write(text, name="mine"):
        (tmp_path / f"{name}.py").write_text(text)
        for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    sys.modules.pop("mine", None)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path / "cache"))


def test_names_of_custom_drafters(tmp_path, monkeypatch):
    assert is_custom("a:b") and is_custom("a.b_c:D.e") and is_custom("é:x")
    for other in (
        "lookup",
        "o/n:Q4_K_M",
        "a:",
        ":b",
        "a.:b",
        "a:b:c",
        "a:b-c",
        "C:\\x",
    ):
        assert not is_custom(other)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Own", "the target"),
        ("Needs", "the target"),
        ("Keyword", "the target"),
        ("Nothing", 3),
        ("Outer.Inner", "the target"),
        ("Outer.object", 3),
    ],
)
def test_a_class_gets_the_target_if_it_takes_one(name, target, module):
    module(MODULE)
    drafter = custom_drafter(f"mine:{name}", "the target")
    assert drafter.target == target


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine:TwoTap", "module 'mine' has no attribute 'TwoTap'; did you mean 'Two"),
        ("mine:Outer.inner", "'Outer' has no attribute 'inner'; did you mean 'Inner'?"),
        ("mine:TwoTaps", "called with the target only, but needs after, project; name"),
        ("mine:two", "but needs target, size"),
        ("mine:forgets", "want a drafter, got None"),
        ("mine:name", "want a drafter, got 'lookup'"),
        ("mine:number", "want a drafter, which has the methods init, propose, commit"),
        ("mine:fails", "calling it failed: RuntimeError: no luck"),
        (
            "nowhere_at_all:x",
            "no module 'nowhere_at_all' on Python's import path; for ",
        ),
        ("mine.inner:x", "no module 'mine.inner' on Python's import path"),
    ],
)
def test_what_is_not_a_drafter_is_one_line(name, problem, module, capsys):
    module(MODULE)
    code = cli.main(["generate", "x", "--drafter", name])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"stree-jax: --drafter {name}: ") and problem in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such"),
        ("def f(:\n", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["serve", "--port", "0"]])
def test_a_module_that_fails_is_one_line(command, text, problem, module, capsys):
    module(text)
    code = cli.main([*command, "--drafter", "mine:x"])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(
        f"stree-jax: --drafter mine:x: importing mine failed: {problem}"
    )


def test_files_of_a_checkpoint_and_of_the_folder_are_not_imported(
    tmp_path, monkeypatch, capsys
):
    model = tmp_path / "model"
    stree_jax.save(stree_jax.load("demo-drafter"), model)
    (model / "modeling.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(model)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    code = cli.main(["generate", "x", "--model", ".", "--drafter", "modeling:x"])
    err = capsys.readouterr().err
    assert code == 2 and "no module 'modeling' on Python's import path" in err
    assert "set PYTHONPATH=." in err


def test_ngrams_need_a_draft_model(module, capsys):
    module(MODULE)
    words = ["--drafter", "mine:make", "--ngrams", "n.safetensors"]
    assert cli.main(["generate", "x", *words]) == 2
    assert "proposes tokens for a draft model" in capsys.readouterr().err


def test_a_custom_drafter_drafts(module, capsys, monkeypatch):
    """In every command that drafts; the text stays that of plain decoding."""
    module(MODULE)
    pair = ["--drafter", "mine:make", "--max-new-tokens", "6"]
    words = ["generate", "def f(x):", *pair, "--compare", "--json"]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal_to_plain"] is True
    assert list(report["calls_by_tree_size"]) == ["16"]  # nodes of tree E
    limited = ["generate", "def f(x):", *pair, "--memory", "1GB", "--json"]
    assert cli.main(limited) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == report["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n/exit\n"))
    assert cli.main(["chat", *pair, "--tree", "chain:2"]) == 0
    assert capsys.readouterr().out.strip()
    parse = cli.build_parser().parse_args
    model, spec, *_ = serve.loaded(parse(["serve", "--drafter", "mine:make"]))
    assert type(load_pair("demo", "mine:ready", None)[1]).__name__ == "TwoTaps"


def test_a_plan_with_a_custom_drafter(module, capsys):
    module(MODULE)
    words = ["plan", "--memory", "1GB", "--drafter", "mine:make", "--context", "256"]
    code = cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    names = {choice["drafter"] for choice in json.loads(out)["choices"]}
    assert "drafter" in names


def test_a_module_in_a_folder_of_pythonpath(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    run = [sys.executable, "-m", "stree_jax", "generate", "def f(x):"]
    done = subprocess.run(
        [*run, "--drafter", "mine:make", "--max-new-tokens", "4", "--json"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 4


def test_a_benchmark_with_a_custom_drafter(module, capsys, tmp_path):
    module(MODULE)
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f(x):"}\n')
    words = ["bench", "decode", "--prompts", str(tmp_path / "p.jsonl")]
    words += ["--drafter", "mine:make", "--arms", "chain:2", "--temperatures", "0"]
    words += ["--max-new-tokens", "4", "--repeats", "1", "--count", "1"]
    assert cli.main(words) == 0
    assert "| chain:2 |" in capsys.readouterr().out
    assert cli.main([*words, "--widen", "4"]) == 2
    assert "--widen: a custom drafter" in capsys.readouterr().err
    words[1:2] = ["cost"]
    assert cli.main([w for w in words if w not in ("--temperatures", "0")]) == 2
    assert "needs a draft model" in capsys.readouterr().err
