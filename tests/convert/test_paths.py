"""Test paths of written models: odd paths, long names, and leftovers of killed
writers."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.saved import atomic, store
from tests.support.checkpoints import assert_same, sources
from tests.support.tiny import tiny

convert = partial(convert_checkpoint, progress=False)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))("mamba2")


@pytest.fixture(scope="module")
def model():
    return tiny(0, layers=("mamba",))


def one_line(call, *args):
    with pytest.raises(CheckpointError) as caught:
        call(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# Paths with characters that tensorstore interprets

ODD = ["a[0-9]b", "back\\slash", "any*thing?", "line\nbreak", "\udcff", "x" * 255]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("parent", [False, True])
def test_odd_names_can_be_loaded(source, model, tmp_path, name, parent):
    folder = tmp_path / name if parent else tmp_path
    folder.mkdir(exist_ok=True)
    made = folder / "model" if parent else folder / name
    stree_jax.save(model, made)
    assert_same(stree_jax.load(made), model)
    assert [file.name for file in folder.iterdir()] == [made.name]
    if parent:
        convert(source, folder / "converted")
        assert_same(stree_jax.load(folder / "converted"), stree_jax.load(source))


def test_odd_names_where_temporary_files_are_odd_as_well(model, tmp_path, monkeypatch):
    (tmp_path / "[ab]").mkdir()
    stree_jax.save(model, tmp_path / "[cd]")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "[ab]"))
    assert "TMPDIR" in one_line(stree_jax.save, model, tmp_path / "[ef]")
    assert "TMPDIR" in one_line(stree_jax.load, tmp_path / "[cd]")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["[ab]", "[cd]"]
    stree_jax.save(model, tmp_path / "plain")
    assert_same(stree_jax.load(tmp_path / "plain"), model)


def test_directories_that_cannot_be_opened_are_not_created(
    model, tmp_path, monkeypatch
):
    original = store.config_to_json

    def of_another(config, dtype):
        return original(replace(config, vocab_size=config.vocab_size + 1), dtype)

    monkeypatch.setattr(store, "config_to_json", of_another)
    told = one_line(stree_jax.save, model, tmp_path / "new")
    assert "embedding: want shape (51, 32) by config.json, got (50, 32)" in told
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_too_long(source, model, tmp_path):
    for call, what in ((stree_jax.save, model), (convert, source)):
        assert "File name too long" in one_line(call, what, tmp_path / ("x" * 256))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["x", None, 5, {}])
def test_save_wants_a_model_and_a_path(model, tmp_path, wrong):
    kind = type(wrong).__name__
    told = one_line(stree_jax.save, wrong, tmp_path / "new")
    assert told == f"save: want a model as `load` returns it, got {kind}"
    if wrong != "x":
        told = one_line(stree_jax.save, model, wrong)
        assert told == f"save: dst: want a path, got {kind}"
    assert list(tmp_path.iterdir()) == []


# Leftovers of killed writers

WRITER = """
import sys, time
from pathlib import Path
from stree_jax.convert.saved.atomic import atomic_directory
with atomic_directory(Path(sys.argv[1])) as temporary:
    (temporary / "part").write_text("x")
    print(temporary.name, flush=True)
    time.sleep(600)
"""


def test_leftovers_of_killed_processes_are_removed(source, tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "dst")]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=pipe, text=True) as killed,
        subprocess.Popen(command, cwd=ROOT, stdout=pipe, text=True) as living,
    ):
        left, used = (p.stdout.readline().strip() for p in (killed, living))
        killed.kill()
        killed.wait()
        told = []
        convert(source, tmp_path / "dst", warn=told.append)
        text = "removed (left by a process that was killed)"
        assert told == [f"{tmp_path / left}: {text}"]
        assert {file.name for file in tmp_path.iterdir()} == {"dst", used}
        assert (tmp_path / used / "part").read_text() == "x"
        living.kill()


def test_only_leftovers_of_the_same_destination_are_removed(source, tmp_path, capsys):
    others = {
        ".dst.tmp-x",
        ".dst2.tmp-abcdefgh",
        "dst.tmp-abcdefgh",
        ".dst.tmp-abcdefghi",
    }
    for name in (*others, ".dst.tmp-abcd_f1h"):
        (tmp_path / name).mkdir()
    (tmp_path / ".dst.tmp-afileabc").write_text("x")
    (tmp_path / ".dst.tmp-alinkabc").symlink_to(tmp_path / ".dst.tmp-x")
    kept = others | {".dst.tmp-afileabc", ".dst.tmp-alinkabc", "dst"}
    assert cli.main(["convert", str(source), str(tmp_path / "dst")]) == 0
    assert {file.name for file in tmp_path.iterdir()} == kept
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1] == f"wrote {tmp_path / 'dst'}"
    assert lines[0].startswith(f"stree-jax: warning: {tmp_path}/.dst.tmp-abcd_f1h: ")


def test_a_directory_removed_before_its_lock_is_made_again(tmp_path, monkeypatch):
    """Another process that writes to the same path takes it for a leftover."""
    lock, removed = atomic._lock, []

    def late(directory):
        if not removed:
            removed.append(directory)
            directory.rmdir()
        return lock(directory)

    monkeypatch.setattr(atomic, "_lock", late)
    with atomic.atomic_directory(tmp_path / "dst") as temporary:
        assert temporary not in removed
        (temporary / "part").write_text("x")
    assert (tmp_path / "dst" / "part").read_text() == "x" and removed


def test_without_locks_nothing_is_removed(model, tmp_path, monkeypatch):
    """As on some network drives; existing directories may be in use."""

    def fail(directory):
        raise OSError("no locks")

    monkeypatch.setattr(atomic, "_lock", fail)
    (tmp_path / ".dst.tmp-abcdefgh").mkdir()
    stree_jax.save(model, tmp_path / "dst")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"dst", ".dst.tmp-abcdefgh"}
    loaded = stree_jax.load(tmp_path / "dst")
    np.testing.assert_array_equal(loaded.params["embedding"], model.params["embedding"])
