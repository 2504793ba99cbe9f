"""The table of commands, commands of other packages, and `bench` outside a clone."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stree_jax.cli import commands
from stree_jax.cli import main as cli
from stree_jax.cli.commands import bench

ROOT = Path(__file__).parents[2]


def test_each_row_of_the_table_is_a_module_and_each_module_a_row():
    modules = {p.stem for p in Path(commands.__file__).parent.glob("*.py")}
    names = [command.name for command in commands.COMMANDS]
    assert {name.replace("-", "_") for name in names} == modules - {"__init__"}
    assert len(set(names)) == len(names)


def hello():
    """Returns a command as another package would define it."""
    return commands.Command(
        "hello",
        "greet somebody",
        lambda parser: parser.add_argument("name", help="whom"),
        lambda args: print(f"hello {args.name}"),
        "NAME",
    )


@pytest.fixture
def plugins(monkeypatch):
    """Sets the entry points that other packages have, as {name: value}."""

    def install(**values):
        found = [EntryPoint(n, v, commands.GROUP) for n, v in values.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)

    monkeypatch.setitem(sys.modules, "hello_package", type("M", (), {"HELLO": hello()}))
    return install


def test_commands_of_other_packages_are_found(plugins, capsys):
    plugins(hello="hello_package:HELLO", generate="hello_package:HELLO")
    assert "greet somebody" in cli.build_parser().format_help()
    assert cli.main(["hello", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    names = [command.name for command in commands.commands()]
    assert names.count("generate") == 1  # of the table


def test_a_command_that_cannot_be_imported_says_so_when_it_is_used(plugins, capsys):
    plugins(hello="no_such_package:HELLO")
    assert cli.main(["info", "demo"]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as end:
        cli.main(["hello"])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1
    assert "hello: no_such_package:HELLO cannot be imported" in err


@pytest.mark.parametrize("words", [["bench"], ["bench", "decode", "--x"]])
def test_bench_outside_a_clone_says_how_to_get_it(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert "git clone " in err


@pytest.mark.parametrize("module", ["bench", "stree_jax"])
def test_bench_runs_in_a_clone(module):
    words = [*(["bench"] if module == "stree_jax" else []), "kernels", "--help"]
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: stree-jax bench kernels")


def test_bench_runs_in_a_clone_beside_another_installation(monkeypatch):
    monkeypatch.setattr(bench, "ROOT", Path("elsewhere"))
    monkeypatch.chdir(ROOT)
    assert bench.clone() == ROOT
