"""Scripts for shell completion: valid, and run in real shells where these exist."""

import shutil
import subprocess

import pytest

from stree_jax.cli import main as cli
from stree_jax.cli.commands.completion import SHELLS, script
from stree_jax.cli.options import WEIGHTS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The files of the scripts, by shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell, cli.build_parser()))
    return {shell: folder / shell for shell in SHELLS}


def needs(shell):
    missing = shutil.which(shell) is None
    return pytest.mark.skipif(missing, reason=f"{shell} is not installed")


def shell_output(*command, cwd=None):
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_command_prints_the_script(scripts, capsys):
    for shell in SHELLS:
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == scripts[shell].read_text()


@pytest.mark.parametrize("shell", [pytest.param(s, marks=needs(s)) for s in SHELLS])
def test_the_syntax_is_valid(shell, scripts):
    assert shell_output(shell, "-n", scripts[shell]) == ""


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
complete -p stree-jax > /dev/null
_shtab_stree_jax
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(scripts, *words, cwd=None):
    """The words that bash offers for the last of `words`."""
    command = "bash", "-c", COMPLETE, "-", scripts["bash"], "stree-jax", *words
    return shell_output(*command, cwd=cwd).split()


@needs("bash")
def test_words_are_completed_in_bash(scripts, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()

    def of(*words):
        return completed(scripts, *words, cwd=tmp_path)

    assert of("gen") == ["generate"]
    assert {"generate", "bench", "completion"} <= set(of(""))
    assert "--version" in of("--")
    assert of("generate", "--dty") == ["--dtype"]
    assert of("generate", "--dtype", "b") == ["bfloat16"]
    assert of("generate", "--dtype", "") == WEIGHTS
    assert of("generate", "--tree", "a") == ["auto"]
    assert of("generate", "x", "--drafter", "lo") == ["lookup"]
    assert set(of("generate", "--drafter", "f")) == {"folder", "file.txt"}
    assert of("generate", "--file", "fi") == ["file.txt"]
    assert of("generate", "--max-new-tokens", "") == []
    assert of("info", "demo-") == ["demo-drafter"]
    assert of("serve", "--po") == ["--port"]
    assert of("generate", "--po") == []
    assert of("bench", "dec") == ["decode"]
    assert of("bench", "decode", "--prom") == ["--prompts"]
    assert of("bench", "heads", "--heads-p") == ["--heads-path"]
    assert of("heads", "--heads-p") == [] and of("heads", "--own-o") == ["--own-output"]
    assert of("completion", "") == list(SHELLS)
    # The name of a command may be a prompt.
    assert of("generate", "bench", "--comp") == ["--compare"]


@needs("fish")
def test_words_are_completed_in_fish(scripts):
    def of(line):
        code = f"source {scripts['fish']}; complete -C {line!r}"
        lines = shell_output("fish", "--no-config", "-c", code).splitlines()
        return [found.partition("\t")[0] for found in lines]

    assert of("stree-jax gen") == ["generate"]
    assert of("stree-jax generate --dty") == ["--dtype"]
    assert of("stree-jax generate --dtype b") == ["bfloat16"]
    assert of("stree-jax bench dec") == ["decode"]
    assert "--prompts" in of("stree-jax bench decode --pro")
    assert "zsh" in of("stree-jax completion ")
