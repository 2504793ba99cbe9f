"""The command as a process: its pipes, and the programs that it keeps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stree_jax.cli import compile_cache
from stree_jax.cli import main as cli

HOME = str(Path("/home/someone"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, f"{HOME}/.cache/stree-jax/xla"),
        ({"XDG_CACHE_HOME": "/var/cache"}, "/var/cache/stree-jax/xla"),
        ({"XDG_CACHE_HOME": "not/absolute"}, f"{HOME}/.cache/stree-jax/xla"),
        ({"STREE_JAX_CACHE": "/fast", "XDG_CACHE_HOME": "/var/cache"}, "/fast/xla"),
        ({"STREE_JAX_CACHE": "~/fast"}, f"{HOME}/fast/xla"),
        ({"STREE_JAX_CACHE": ""}, None),
        ({"STREE_JAX_CACHE": "off"}, None),
        ({"STREE_JAX_CACHE": "~nobody-of-this-name"}, None),
    ],
)
def test_where_programs_are_kept(settings, expected, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {"HOME": HOME, **settings})
    found = compile_cache.cache_directory()
    assert found == (None if expected is None else Path(expected))
    shown = "no folder" if expected is None else Path(expected).parent
    help = " ".join(cli.build_parser().format_help().split())
    assert help.count(f"programs are kept in {shown} ")


@pytest.fixture
def environment(monkeypatch, tmp_path):
    values = {"STREE_JAX_CACHE": str(tmp_path / "kept")}
    monkeypatch.setattr(os, "environ", values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filterwarnings", lambda *args: None)
        yield values


def test_settings_that_stand_are_kept(environment, tmp_path):
    compile_cache.keep_programs()
    kept = tmp_path / "kept/xla"
    assert kept.is_dir() and compile_cache.kept_programs() == kept
    assert environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    shutil.rmtree(tmp_path / "kept")
    environment["JAX_COMPILATION_CACHE_DIR"] = "/mine"
    compile_cache.keep_programs()
    assert compile_cache.kept_programs() == Path("/mine") and not kept.exists()


@pytest.mark.parametrize("case", ["not a folder", "read-only", "full"])
def test_folders_that_cannot_be_written(case, environment, tmp_path, monkeypatch):
    if case == "not a folder":
        (tmp_path / "kept").write_text("a file")
    elif case == "read-only":
        monkeypatch.setattr(os, "access", lambda *args: False)
    else:
        (tmp_path / "kept").mkdir()
        used = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    compile_cache.keep_programs()
    assert compile_cache.kept_programs() is None
    assert not [name for name in environment if name.startswith("JAX")]


def process(code, tmp_path, **options):
    """Python in a process of its own, whose programs are kept in tmp_path."""
    names = ("JAX_COMPILATION", "JAX_PERSISTENT", "XDG_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        env={**kept, "STREE_JAX_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        **options,
    )


COMPILES = """
import sys
from stree_jax.cli import main as cli
def run(args):
    import jax
    print(jax.jit(lambda x: x * 3 + 1)(2.0))
cli.run_command = run
sys.argv = ["stree-jax", "info", "demo"]
cli.console()
"""


def test_small_programs_are_kept_and_damaged_ones_compiled_anew(tmp_path):
    for damage in (None, b"", b"not a program"):
        for file in (tmp_path / "xla").glob("*-cache"):
            file.write_bytes(damage or b"")
        done = process(COMPILES, tmp_path)
        assert (done.stdout, done.stderr) == ("7.0\n", "")
        assert any("lambda" in file.name for file in (tmp_path / "xla").iterdir())


def test_bench_keeps_nothing(tmp_path):
    code = COMPILES.replace('"info", "demo"', '"bench", "kernels"')
    assert process(code, tmp_path).stdout == "7.0\n"
    assert not (tmp_path / "xla").exists()


def jax_settings():
    return {name: v for name, v in os.environ.items() if name.startswith("JAX")}


def test_within_a_process_nothing_is_set(capsys):
    before = jax_settings()
    assert cli.main(["info", "demo"]) == 0
    assert jax_settings() == before


@pytest.mark.parametrize("text", ["", "x" * 100_000])
def test_a_closed_pipe_ends_the_command_quietly(text, tmp_path):
    """Closed before the first character, and while there is more to print."""
    code = (
        "import sys\n"
        "from stree_jax.cli import main as cli\n"
        f"cli.run_command = lambda args: print('x', {text!r})\n"
        "sys.argv = ['stree-jax', 'info', 'demo']\n"
        "sys.exit(cli.console())\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_objects_are_frozen_only_where_the_process_ends(monkeypatch, capsys):
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    assert cli.console(["--version"]) == 0 and not frozen
    monkeypatch.setattr(sys, "argv", ["stree-jax", "--version"])
    assert cli.console() == 0 and frozen == [True]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_reported_once(flush):
    """By the command itself, which prints parts of a text, or at its end."""
    code = (
        "import sys\n"
        "from stree_jax.cli import main as cli\n"
        f"cli.run_command = lambda args: print('x', flush={flush})\n"
        "sys.argv = ['stree-jax', 'info', 'demo']\n"
        "sys.exit(cli.console())\n"
    )
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            env=buffered,
            text=True,
        )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.endswith("No space left on device")
