"""Test that pipes, devices, folders and huge files are refused at once, in one line.

Without a check, a pipe would block the reader and /dev/zero would never end.
"""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

import stree_jax
from bench.prompts import read_prompts
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.cli.chat import read_chat_template, read_special_tokens
from stree_jax.cli.commands.serve import api_keys
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import read_file
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.convert.saved.store import quiet_orbax
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.sizing import step_times
from stree_jax.training.recipe import Job, read_tokenizer_file
from stree_jax.training.saves import one_line_errors
from stree_jax.training.texts import Tally, read_texts
from stree_jax.training.train import TrainConfig
from tests.support.table_models import byte_level, padded_size, write_llama

KINDS = ("pipe", "device", "folder", "terabyte")


@pytest.fixture(autouse=True)
def deadline():
    """Fails a test that blocks or reads for too long."""

    def ring(*args):
        raise TimeoutError("it waits, or reads without an end")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)  # generous, so that a busy machine does not fail the test
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(file, kind):
    file.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "terabyte":
            with file.open("wb") as opened:
                opened.truncate(2**40)
    return file


def refused(run, *args):
    with pytest.raises(ValueError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = byte_level()
    folder = tmp_path_factory.mktemp("models") / "llama"
    return write_llama(folder, padded_size(tokenizer), tokenizer=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "generation_config.json"),
        *("mamba_config.json", "model.safetensors.index.json", "model.safetensors"),
    ],
)
def test_odd_files_in_a_model_directory(model, tmp_path, name, kind):
    folder = shutil.copytree(model, tmp_path / "model")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    put(folder / name, kind)
    assert str(folder) in refused(stree_jax.load, folder)
    if name not in ("tokenizer.json", "model.safetensors"):
        assert str(folder) in refused(info, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_odd_chat_templates_and_tokenizer_settings(model, tmp_path, name, kind):
    folder = shutil.copytree(model, tmp_path / "model")
    put(folder / name, kind)
    assert name in refused(read_chat_template, CheckpointFiles(folder))
    if name.startswith("tokenizer"):
        assert name in refused(read_special_tokens, CheckpointFiles(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_step_time_file_is_replaced(tmp_path, monkeypatch, kind):
    """A file that cannot be read counts as absent, and the times are measured again."""
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))
    put(tmp_path / step_times.FILE, kind)
    assert step_times._read() == {}
    step_times._write("key", step_times.Measured({1: 0.5}, 0.0, 0.0))
    kept = kind != "folder"  # a folder is not replaced
    assert step_times._read() == (
        {"key": step_times.Measured({1: 0.5}, 0.0, 0.0)} if kept else {}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_as_arguments_of_commands(tmp_path, capsys, kind):
    file = put(tmp_path / "given", kind)
    assert str(file) in refused(stree_jax.load_drafter, file)
    assert str(file) in refused(api_keys, file)
    assert str(file) in refused(read_tokenizer_file, file)
    assert str(file) in refused(read_prompts, [file], 3)
    for option in (["generate", "--file"], ["generate", "x", "--drafter"]):
        assert cli.main([*option, str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(file) in err
    weights = put(tmp_path / "model.gguf", kind)
    assert str(weights) in refused(stree_jax.load, weights)


def test_a_pipe_in_place_of_heads(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    put(tmp_path / "medusa_lm_head.safetensors", "pipe")
    assert "not a regular file" in refused(stree_jax.load_drafter, tmp_path)


def test_endless_standard_input(monkeypatch, capsys):
    for command in ("generate", "chat"):
        with open("/dev/zero") as endless:
            monkeypatch.setattr("sys.stdin", endless)
            assert cli.main([command]) == 2
        assert "standard input: more than" in capsys.readouterr().err


def test_a_pipe_of_process_substitution_is_read():
    """`--file <(command)` in bash is a pipe that ends."""
    read, write = os.pipe()
    thread = threading.Thread(target=os.write, args=(write, b"text"))
    thread.start()
    thread.join()
    os.close(write)
    place = f"/dev/fd/{read}"
    assert read_file(Path(place), pipe=True) == b"text"
    os.close(read)


FULL = """
import resource, sys
import stree_jax
from stree_jax.cli.main import main

model = stree_jax.load(sys.argv[1])
for bytes in (100, 4000, 20_000):  # files divide the weights by chance
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))
    try:
        stree_jax.save(model, sys.argv[2])
    except stree_jax.CheckpointError as error:
        print(error)
    main(["export", sys.argv[1], sys.argv[2]])
    main(["convert", sys.argv[1], sys.argv[2]])
"""


def test_a_full_disk_is_reported_in_one_line(model, tmp_path):
    """A limit on file size makes the same writes fail as a full disk."""
    dst = tmp_path / "dst"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(model), str(dst)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 9, done.stderr
    problem = f"{dst}: cannot be written (File too large)"
    assert {line.removeprefix("stree-jax: ") for line in lines} == {problem}
    assert list(tmp_path.iterdir()) == []


def test_late_errors_of_a_failed_save_are_not_logged(caplog, monkeypatch):
    """A save is many writes. asyncio logged the errors of all but one after the line
    that reports it, some runs only."""
    log = logging.getLogger("asyncio")
    monkeypatch.setattr(log, "filters", [])
    full = ValueError("Failed writing: [os_error_code='27']")
    with pytest.raises(ValueError, match="27"), quiet_orbax():
        raise full
    for error in (full, ValueError("something else")):
        log.error("Task exception was never retrieved\nfuture: ..", exc_info=error)
    log.error("Executing took too long", exc_info=full)
    found = [record.exc_info[1] for record in caplog.records]
    assert list(map(str, found)) == ["something else", str(full)]
    with quiet_orbax():
        pass
    assert not log.filters


def test_a_failed_save_does_not_warn_of_writes_that_it_did_not_begin():
    """Python warned of coroutines that were never awaited, some runs only."""

    async def async_serialize_from_host():
        pass

    async def something_else():
        pass

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="27"), quiet_orbax():
            write, other = async_serialize_from_host(), something_else()
            raise ValueError("Failed writing: [os_error_code='27']")
        del write, other  # Python collects them here
    assert [str(each.message).split("'")[1].split(".")[-1] for each in found] == [
        "something_else"
    ]
    before = list(warnings.filters)
    with quiet_orbax():
        pass
    assert warnings.filters == before


def test_a_failed_write_with_late_threads_leaves_nothing(tmp_path, monkeypatch):
    """A thread creates a file while the folder is being removed, so that rmdir
    fails."""
    rmtree, late = shutil.rmtree, [b"the last thread"]

    def remove(folder, **options):
        if late:
            (Path(folder) / "late").mkdir()
            monkeypatch.setattr(os, "rmdir", not_empty)
            late.pop()
        rmtree(folder, **options)
        monkeypatch.undo()

    def not_empty(folder, **options):
        raise OSError("Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", remove)
    with (
        pytest.raises(CheckpointError, match="full"),
        atomic_directory(tmp_path / "dst"),
    ):
        raise CheckpointError("the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_a_late_thread_creates_the_removed_directory_again(tmp_path, monkeypatch):
    """tensorstore's threads create missing parents of the file that they write."""
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            (folder / "params").mkdir(parents=True)

    monkeypatch.setattr(time, "sleep", sleep)
    with (
        pytest.raises(CheckpointError, match="full"),
        atomic_directory(tmp_path / "dst") as folder,
    ):
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == []
    assert len(looks) > 3, "no look came after the thread's"


def test_too_little_disk_space_is_reported_before_writing(model, tmp_path, monkeypatch):
    loaded = stree_jax.load(model)
    used = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    with pytest.raises(CheckpointError, match="0.00 GB are free"):
        stree_jax.save(loaded, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == []


FULL_WORK = """
import resource, sys
from stree_jax.cli.main import main

model, text, work, kind, size = sys.argv[1:]
size = int(size)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
small = "--steps 1 --batch 2 --length 16 --save-minutes 99".split()
small += dict(heads="--tokens 400 --own-tokens 0", distill="--width 64 --layers 1")[
    kind
].split()
words = kind, "--target", model, "--text", text, "--out", work + "-out", "--work", work
sys.exit(main([*words, *small]))
"""


@pytest.mark.parametrize(("kind", "size"), [("heads", 4000), ("distill", 45_000)])
def test_a_full_disk_ends_training_with_one_line(model, tmp_path, kind, size):
    """Without a check, `heads` was killed by a signal (a memory-mapped file), and
    `distill` printed 300 lines."""
    text = tmp_path / "text.txt"
    text.write_text("abc def " * 4000)
    work = tmp_path / "work"
    done = subprocess.run(
        [*(sys.executable, "-c", FULL_WORK, str(model), str(text)), str(work), kind]
        + [str(size)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"stree-jax: {work}")
    assert "cannot be written (File too large" in last


@pytest.mark.parametrize("kind", KINDS)
def test_odd_chat_template_files_for_training(model, tmp_path, capsys, kind):
    file = put(tmp_path / "given", kind)
    words = ["distill", "--target", str(model), "--chat-template", str(file)]
    text = tmp_path / "text.txt"
    text.write_text("abc")
    words += ["--text", str(text), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--work", str(tmp_path / "work")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--chat-template" in err and str(file) in err


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.md.gz"])
def test_a_huge_file_of_one_line_is_refused(tmp_path, monkeypatch, name):
    """The file holds a terabyte of zeros, one line that does not fit in memory."""
    monkeypatch.setattr("stree_jax.training.record_files.MAX_LINE", 4096)
    given = put(tmp_path / name, "terabyte")
    assert str(given) in refused(list, read_texts([given], Tally()))


@pytest.mark.parametrize("kind", ["pipe", "device", "terabyte"])
def test_the_work_directory_must_be_a_directory(tmp_path, kind):
    work = put(tmp_path / "work", kind)
    for place in (work, work / "below"):
        job = Job([tmp_path], tmp_path / "out", place, TrainConfig(steps=1))
        assert str(work) in refused(job.check)


def test_only_file_errors_are_reported_as_file_errors(tmp_path):
    with pytest.raises(BrokenPipeError), one_line_errors(tmp_path):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # on standard output
    with (
        pytest.raises(ValueError, match="cannot be written"),
        one_line_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "file")
