"""Test terminals that cannot print a character, closed pipes, and absent streams."""

import io
import json
import os
import subprocess
import sys
import time

import pytest

from stree_jax.cli import main as cli
from stree_jax.cli import origins, terminal
from stree_jax.cli.streams import printable
from tests.support.table_models import byte_level, follow, padded_size, write_llama

SAID = "é東😀"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model that says "é東😀" after "a", byte by byte.

    Its folder has a Greek name.
    """
    tokenizer = byte_level()
    alphabet = tokenizer.pre_tokenizer.pre_tokenize_str
    letters = [letter for char in SAID for letter in alphabet(char)[0][0]]
    assert len(letters) == len(set(letters)) == 9
    chain = follow(tokenizer, ["a", *letters, "</s>"], rest=2)
    folder = tmp_path_factory.mktemp("models") / "λάμα"
    V = padded_size(tokenizer)
    return write_llama(folder, V, tokenizer=tokenizer, chain=chain)


class Typed(io.TextIOWrapper):
    """A stream of this process that behaves like a terminal with the given encoding."""

    def __init__(self, encoding, text=b"", tty=False):
        super().__init__(io.BytesIO(text), encoding, newline="", write_through=True)
        self.tty = tty

    def isatty(self):
        return self.tty

    def written(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def run(monkeypatch, encoding, *args, stdin=b""):
    out, err = Typed(encoding), Typed(encoding)
    err.reconfigure(errors="backslashreplace")  # as Python's stderr is
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("sys.stdin", Typed("ascii", stdin))
    code = cli.main([str(arg) for arg in args])
    assert out.errors == "strict"  # restored
    return code, out.written(), err.written()


ASCII = r"\xe9\u6771\U0001f600"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", ASCII), ("latin-1", "é" + ASCII[4:]), ("utf-8", SAID)],
)
def test_unprintable_characters_are_escaped(model, monkeypatch, encoding, shown):
    plain = "--model", model, "--drafter", "none", "--max-new-tokens", 12
    code, out, err = run(monkeypatch, encoding, "generate", "a", *plain)
    assert code == 0 and out.startswith(f"a{shown}\n["), err
    code, out, _ = run(monkeypatch, encoding, "generate", "a", *plain, "--explain")
    assert code == 0 and out.startswith(f"a{shown}\n[proposed by: target")
    code, out, _ = run(monkeypatch, encoding, "generate", "a", *plain, "--json")
    assert code == 0 and json.loads(out)["text"] == SAID
    code, out, _ = run(monkeypatch, encoding, "chat", *plain, stdin=b"a")
    # The text after "\n" is that of the table
    assert code == 0 and shown[:4] in out + shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["info", "plan"])
def test_model_names_in_other_alphabets(model, monkeypatch, encoding, command):
    args = ["info", model] if command == "info" else ["plan", "--model", model]
    args += [] if command == "info" else ["--memory", "1GB"]
    code, out, err = run(monkeypatch, encoding, *args)
    assert code == 0 and out, err
    code, out, err = run(monkeypatch, encoding, command, *args[1:], "--json")
    assert code == 0 and json.loads(out)
    code, out, err = run(monkeypatch, encoding, "info", f"{model}x")
    assert code == 2 and err.count("\n") == 1 and "no such directory" in err


def test_a_prompt_on_standard_input_is_utf_8(monkeypatch):
    """Whatever the encoding of the terminal, since a pipe is not a terminal."""
    monkeypatch.setattr("sys.stdin", Typed("ascii", "é\r\n東".encode()))
    assert terminal.read_stdin() == "é\n東"
    monkeypatch.setattr("sys.stdin", Typed("ascii", "é\n東".encode()))
    assert [terminal.read_stdin(line=True) for _ in range(3)] == ["é\n", "東", ""]
    monkeypatch.setattr("sys.stdin", Typed("ascii", b"\xef\xbb\xbfp"))
    # The byte order mark is dropped, as with --file
    assert terminal.read_stdin() == "p"
    monkeypatch.setattr("sys.stdin", Typed("latin-1", b"\xe9"))
    with pytest.raises(ValueError, match="standard input: not UTF-8 text"):
        terminal.read_stdin()


def test_every_help_text_prints_in_ascii(monkeypatch):
    commands = "generate chat serve convert export info train distill heads ngrams"
    for command in (*f"{commands} tune plan bench".split(), None):
        out = Typed("ascii")
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(SystemExit) as end:
            cli.main([*([command] if command else []), "--help"])
        assert end.value.code == 0 and "usage: stree-jax" in out.written()


@pytest.mark.parametrize(
    ("encoding", "errors", "printed"),
    [
        ("ascii", "strict", rb"a\xe9\ud800"),
        ("ascii", "surrogateescape", rb"a\xe9\ud800"),
        ("ascii", "replace", b"a??"),
        ("utf-8", "strict", b"a\xc3\xa9\\ud800"),
    ],
)
def test_any_character_can_be_printed(monkeypatch, encoding, errors, printed):
    """Lone surrogates too. An error handler chosen by the user (PYTHONIOENCODING)
    stays."""
    out = Typed(encoding)
    out.reconfigure(errors=errors)
    monkeypatch.setattr("sys.stdout", out)
    with printable():
        print("a\xe9\ud800", end="")
    assert out.buffer.getvalue() == printed and out.errors == errors


def test_stdout_can_be_an_object_without_a_file(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["info", "demo", "--json"]) == 0
    assert json.loads(out.getvalue())["format"]


@pytest.mark.parametrize(
    ("settings", "colours"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_used_only_where_supported(monkeypatch, settings, colours):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert origins.coloured(Typed("utf-8", tty=True)) is colours
    assert origins.coloured(Typed("utf-8")) is False


@pytest.mark.parametrize("columns", ["0", "1", "-3"])
def test_terminals_without_a_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    err = Typed("ascii", tty=True)
    err.reconfigure(errors="backslashreplace")
    monkeypatch.setattr("sys.stderr", err)
    with terminal.waiting("reading é"):
        time.sleep(0.05)
    assert cli.build_parser().format_help()


STUB = """
import sys
from stree_jax.cli import main as cli
def run(args):
    print({text!r})
    cli.print_status("told")
cli.run_command = run
sys.argv = ["stree-jax", *{args!r}]
sys.exit(cli.console())
"""


def shell(redirection, text="é", args=("info", "demo"), **settings):
    """Runs the command in a shell. Returns its exit code, stdout and stderr."""
    code = STUB.format(text=text, args=list(args))
    paths = os.pathsep.join(path for path in sys.path if path)
    script = f'set -o pipefail; "$0" -c "$1" {redirection}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, code],
        env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": ""} | settings,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        ("<&-", (0, "é\n", "told\n")),
        (">&-", (0, "", "told\n")),
        ("2>&-", (0, "é\n", "")),
        ("<&- >&- 2>&-", (0, "", "")),
        (
            ">/dev/full",
            (2, "", "told\nstree-jax: standard output: No space left on device\n"),
        ),
    ],
)
def test_closed_and_full_streams(redirection, expected):
    assert shell(redirection) == expected


def test_ascii_output_and_a_closed_pipe():
    assert shell("", PYTHONIOENCODING="ascii") == (0, "\\xe9\n", "told\n")
    code, out, err = shell("| head -1", args=["--help"])
    assert (code, out.count("\n"), err) == (0, 1, "")
