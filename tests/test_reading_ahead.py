"""Compiled programs that a thread reads while the model loads."""

import json
import os
import re

import jax
import numpy as np
import pytest

from stree_jax.common import programs, reading_ahead
from stree_jax.common.programs import Jitted, begin, keep_in, read_ahead
from stree_jax.common.reading_ahead import (
    FILE,
    MOST_BYTES,
    MOST_PROGRAMS,
    MOST_STARTS,
)


def doubled(values: jax.Array, *, power: int = 1) -> jax.Array:
    traced.append(power)
    return 2 * values**power


traced: list[int] = []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Keeps programs in a folder."""
    monkeypatch.setattr(programs, "PACKAGES", {*programs.PACKAGES, "tests"})
    keep_in(tmp_path / "programs")
    yield tmp_path / "programs"
    keep_in(None)
    programs._ahead.forget()


@pytest.fixture
def read(monkeypatch):
    """Returns the names of the files that are read, in the thread or not."""
    names, before = [], programs._read
    monkeypatch.setattr(programs, "_read", lambda f: names.append(f.name) or before(f))
    return names


def started(*powers: int, options: str = "options") -> None:
    """Computes powers as a new process would that begins with these options."""
    jax.clear_caches()
    traced.clear()
    programs._ahead = reading_ahead.ReadingAhead()
    before, programs._functions = programs._functions, []
    try:
        begin(options)
        read_ahead()
        function = Jitted(doubled, static=("power",))
        for power in powers:
            values = np.arange(3, dtype=np.float32)
            found = np.asarray(function(values, power=power))
            assert found.tolist() == (2 * values**power).tolist()
    finally:
        programs._functions = before


def noted(folder, options: str = "options"):
    name = reading_ahead.name_of_start(options)
    return json.loads((folder / FILE).read_bytes()).get(name)


def test_the_programs_of_the_last_start_are_read_once(folder, read):
    started(1, 2)
    assert traced == [1, 2] and len(noted(folder)) == 2
    read.clear()
    started(1, 2)
    assert not traced and read == noted(folder) and not programs._ahead._read
    started(1, options="others")
    assert noted(folder, "others") == noted(folder)[:1]


def test_programs_of_other_arguments_are_not_used(folder):
    started(1, 2)
    first = noted(folder)
    started(3, 2)
    assert traced == [3] and noted(folder)[0] != first[0]
    started(3, 2)
    assert not traced and noted(folder)[1] == first[1]
    started(4, 2)
    assert traced == [4] and not programs._ahead._read  # that of power 3 is freed


def test_a_process_that_has_programs_reads_none_ahead(folder, read):
    function = Jitted(doubled, static=("power",))
    function(np.arange(3, dtype=np.float32))
    assert not (folder / FILE).exists()  # without options
    started(1)
    read.clear()
    begin("options")
    read_ahead()
    assert not read and programs._ahead.start is None


def test_at_most_some_programs_and_starts_are_noted(folder):
    started(*range(1, MOST_PROGRAMS + 3))
    assert len(noted(folder)) == MOST_PROGRAMS
    for number in range(MOST_STARTS + 2):
        started(1, options=f"options {number}")
    starts = json.loads((folder / FILE).read_bytes())
    assert len(starts) == MOST_STARTS and noted(folder) is None


def _link(file):
    file.symlink_to(file.rename(file.with_name("moved")))


def _pipe(file):
    file.unlink()
    os.mkfifo(file, 0o600)


SPOILS = {
    "another form": lambda f: f.write_text("[1, 2]"),
    "numbers": lambda f: f.write_text(re.sub(r"\[.*?\]", "[1]", f.read_text())),
    "paths": lambda f: f.write_text(f.read_text().replace("doubled", "../doubled")),
    "cut": lambda f: f.write_bytes(f.read_bytes()[:-9]),
    "deep": lambda f: f.write_text("[" * 100_000),
    "long": lambda f: f.write_text(f.read_text() + " " * MOST_BYTES),
    "open to others": lambda f: f.chmod(0o666),
    "a link": _link,
    "a pipe": _pipe,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_list_that_is_damaged_or_open_to_others_is_replaced(folder, read, spoil):
    started(1)
    names = noted(folder)
    SPOILS[spoil](folder / FILE)
    read.clear()
    started()
    assert not read
    started(1)
    assert not traced and noted(folder) == names and (folder / FILE).is_file()


def test_a_damaged_program_is_compiled_again(folder):
    started(1)
    (file,) = (folder / name for name in noted(folder))
    file.write_bytes(file.read_bytes()[:-100])
    started(1)
    assert traced == [1]


def test_a_folder_that_cannot_be_written_changes_nothing(folder, monkeypatch):
    def refuse(*_):
        raise OSError("read-only file system")

    monkeypatch.setattr(reading_ahead, "write_whole", refuse)
    started(1)
    started(1)
    assert not traced and not (folder / FILE).exists()
