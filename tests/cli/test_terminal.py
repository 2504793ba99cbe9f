"""Text in a terminal: wrong options, what is said while waiting, and figures."""

import dataclasses
import io
import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from stree_jax.cli import main as cli
from stree_jax.cli import origins, terminal
from stree_jax.generation.result import Generation
from tests.support.tiny import too_much


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *args):
    """The one line that a command refuses its input with."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("stree-jax: ")
    return err


@pytest.mark.parametrize(
    "option",
    [("--top-k", 3), ("--top-p", 1.0), ("--min-p", 0.0), ("--seed", 0)],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_sampling_options_want_a_temperature(command, option, capsys):
    for temperature in ([], ["--temperature", "0"], ["--repetition-penalty", "1.3"]):
        err = refused(capsys, *command, *option, *temperature)
        assert f"{option[0]}: " in err and "add --temperature" in err


def test_log_probabilities_want_json(capsys):
    assert "add --json" in refused(capsys, "generate", "x", "--logprobs", 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (r"\n\n", "\n\n"),
        (r"\tx\r", "\tx\r"),
        (r"\\n", r"\n"),
        (r"\u6771", "東"),
        (r"\ud83d\ude00.", "😀."),
        ("\n é 東 😀", "\n é 東 😀"),
    ],
)
def test_escapes_in_stop_strings(given, text):
    args = cli.build_parser().parse_args(["generate", "--stop", given, "--stop", "x"])
    assert args.stop == [text, "x"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("x\\", "unknown escape \\;"),
        (r"\q", r"unknown escape \q; known: \n \t \r \\ \uXXXX (in hex)"),
        (r"\u12", r"unknown escape \u;"),
        ("\\\n", "unknown escape"),
        (r"\ud83d", "half a character"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_bad_escapes(given, problem, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "x", "--stop", given])
    err = capsys.readouterr().err
    assert end.value.code == 2 and problem in err
    assert err.startswith("stree-jax generate: --stop: ")
    assert err.replace("\\\n", "").count("\n") == 1
    assert err.endswith("(see stree-jax generate --help)\n")


def no_text():
    return io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8", "surrogateescape")


def test_prompts_that_are_no_text(capsys, monkeypatch, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    err = refused(capsys, "generate", "--file", tmp_path / "bytes")
    assert "bytes: not UTF-8 text" in err
    assert str(tmp_path) in refused(capsys, "generate", "--file", tmp_path)
    assert "the prompt: not UTF-8 text" in refused(capsys, "generate", "\udcff")
    monkeypatch.setattr("sys.stdin", no_text())
    assert "standard input: not UTF-8 text" in refused(capsys, "generate")
    monkeypatch.setattr("sys.stdin", no_text())
    code, out, err = run(capsys, "chat")  # the last line of stderr, after the banner
    assert (code, out) == (2, "")
    assert "standard input: not UTF-8 text" in err.splitlines()[-1]
    err = refused(capsys, "chat", "--context", 0)
    assert "--context: want at least 2 tokens, got 0" in err


def raising(error):
    def run_command(args):
        raise error

    return run_command


def test_numbers_and_memory_that_are_too_large(capsys, monkeypatch):
    monkeypatch.setattr(cli, "run_command", too_much)
    err = refused(capsys, "info", "demo")
    assert "out of memory (RESOURCE_EXHAUSTED: Out of memory allocating" in err
    assert "lower --max-new-tokens" in err
    for error, problem in (
        (MemoryError(), "out of memory"),
        (OverflowError("10**11"), "a number is too large (10**11)"),
        (ValueError("two\nlines"), "two lines"),
        (OSError(), "OSError"),
    ):
        monkeypatch.setattr(cli, "run_command", raising(error))
        assert problem in refused(capsys, "info", "demo")
    for error in (RuntimeError("a defect"), jax.errors.JaxRuntimeError("INTERNAL")):
        monkeypatch.setattr(cli, "run_command", raising(error))
        with pytest.raises(RuntimeError, match=str(error)):
            cli.main(["info", "demo"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_waiting_is_said_to_a_terminal_and_wiped(monkeypatch, capsys):
    def wait(stderr, seconds):
        monkeypatch.setattr("sys.stderr", stderr)
        with pytest.raises(KeyError), terminal.waiting("compiling " + "x" * 200):
            time.sleep(seconds)
            raise KeyError
        return stderr.getvalue()

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.01)
    said = wait(Terminal(), 0.5)
    line, rest = said.split("\r")
    assert line.startswith("stree-jax: compiling") and len(line) == 39
    assert rest == "\x1b[K"
    assert wait(io.StringIO(), 0.1) == ""
    monkeypatch.setattr(terminal, "PATIENCE_S", 60)
    assert wait(Terminal(), 0) == ""


def part(text, tokens, seconds):
    """What a stream gives: all so far, and its seconds."""
    return Generation(
        tokens=[[1] * tokens],
        lengths=np.array([tokens]),
        texts=[text],
        new_texts=[text],
        finish_reasons=["length"],
        stop_reasons=[None],
        logprobs=None,
        target_calls=np.array([tokens]),
        acceptance_length=np.array([1.0]),
        origins=[np.zeros(tokens, np.uint8)],
        tree_sizes=(1,),
        calls_by_size=np.array([[tokens]]),
        expected_tokens=None,
        gained=np.zeros((1, 2), int),
        min_margin=np.array([1.0]),
        promise="tokens",
        traffic=(),
        past=None,
        prefill_s=5.0,
        decode_s=seconds,
    )


@pytest.mark.parametrize(
    ("parts", "rate"),
    [
        ([part("a", 8, 10.0), part("b", 16, 11.0), part("c", 28, 12.0)], 10.0),
        ([part("a", 8, 10.0)], None),
    ],
)
def test_the_rate_leaves_out_compilation(parts, rate, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "stream", lambda *args, **options: iter(parts))
    code, out, _ = run(capsys, "generate", "x", "--json")
    report = json.loads(out)
    assert code == 0 and report["tokens_per_s"] == rate
    assert len(report["tokens"]) == len(parts[-1].tokens[0])
    assert report["prefill_s"] == 5.0 and report["first_run_s"] < 10


def test_a_long_wait_for_the_first_word_is_told_on_stderr_alone(monkeypatch, capsys):
    def slow(*args, **options):
        time.sleep(0.5)
        yield part("one", 8, 10.0)
        time.sleep(0.5)
        yield part(" two", 16, 20.0)

    monkeypatch.setattr(terminal, "stream", slow)
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.1)
    monkeypatch.setattr(terminal, "load_pair", lambda *names: (model, None))
    model = SimpleNamespace(tokenizer="one", weight_format="float32")
    monkeypatch.setattr(terminal, "encode_prompts", lambda *_: [[1, 2]])
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    assert cli.main(["generate", "x"]) == 0
    assert capsys.readouterr().out.startswith("xone two\n[16 tokens")
    assert stderr.getvalue().count("working (compiles") == 1
    waited, _, speeds = stderr.getvalue().partition("\r\x1b[K")
    assert waited and speeds.startswith("[prompt: 2 tokens, ")


class Spelling:
    """A tokenizer of one byte a token."""

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", "replace")


def test_words_are_marked_by_who_drafted_them():
    text = "abcdé".encode()
    one = dataclasses.replace(
        part(text.decode(), len(text), 1.0),
        tokens=[list(text)],
        origins=[np.array([0, 1, 1, 2, 2, 0], np.uint8)],  # é is half looked up
    )
    shown = origins.explained(Spelling(), one, False)
    assert shown == "a{bc}dé\n[proposed by: target, {drafter}, <lookup>]"
    shown = origins.explained(Spelling(), one, True)
    assert shown.startswith("a\x1b[32mbc\x1b[0mdé\n")


class SlowInput(io.BytesIO):
    """Standard input from a pipe whose writer takes its time."""

    def __init__(self, data, seconds):
        super().__init__(data)
        self.seconds = seconds
        self.buffer = self

    def isatty(self):
        return False

    def read(self, *size):
        time.sleep(self.seconds)
        return super().read(*size)


@pytest.mark.parametrize(("seconds", "lines"), [(0.5, 1), (0, 0)])
def test_a_slow_pipe_is_named(seconds, lines, monkeypatch, capsys):
    """A prompt that does not come looks like a command that hangs."""
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.1 if seconds else 60)
    monkeypatch.setattr("sys.stdin", SlowInput(b"def f", seconds))
    args = cli.build_parser().parse_args(["generate"])
    assert terminal.read_prompt(args) == "def f"
    said = "stree-jax: reading the prompt from standard input (end with Ctrl-D)\n"
    assert capsys.readouterr().err == said * lines


def test_a_typed_prompt_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("def f"))
    args = cli.build_parser().parse_args(["generate"])
    assert terminal.read_prompt(args) == "def f"
    assert "reading the prompt from standard input" in capsys.readouterr().err


def test_earlier_answers_are_drafted(capsys, tmp_path):
    """Texts and records are drafted, and the text stays what it is."""
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    words = ["generate", "def add(a, b):", "--max-new-tokens", "16", "--json"]
    words += ["--drafter", "lookup", "--tree", "chain:7"]
    plain = json.loads(run(capsys, *words)[1])
    text.write_text(plain["text"])
    records.write_text(json.dumps({"prompt": "x\n", "completion": plain["text"]}))
    for file in (text, records):
        found = json.loads(run(capsys, *words, "--earlier", file)[1])
        assert found["tokens"] == plain["tokens"]
        assert found["target_calls"] < plain["target_calls"]
        assert found["tokens_by_origin"]["earlier text"] > 4
    assert plain["tokens_by_origin"]["earlier text"] == 0
    sampled = ["--earlier", text, "--temperature", "0.8"]
    assert json.loads(run(capsys, *words, *sampled)[1])["tokens"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"abc\xff\xfe", "not UTF-8 text"),
        ("a.txt", b"", "contains no text"),
        ("a.txt", b" \n", "contains no text"),
        ("a.txt", b"a " * 2**23 + b"a", "want at most 16777216"),
        ("a.jsonl", b'{"prompt": ', "not JSON"),
        ("a.json.gz", b"abc", "cannot be unpacked"),
        ("a.bin", b"abc", "to read it as text, name it .txt"),
        ("a.txt", None, "no such file"),
        (".", None, "want a file, got a folder"),
    ],
)
def test_files_of_earlier_answers_that_cannot_be_read(
    capsys, tmp_path, name, content, problem
):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    err = refused(capsys, "generate", "x", "--earlier", file)
    assert "--earlier: " in err and problem in err


@pytest.mark.parametrize("options", [["none"], ["demo-drafter", "--tree", "E"]])
def test_drafters_that_do_not_use_earlier_answers(capsys, tmp_path, options):
    file = tmp_path / "a.txt"
    file.write_text("return x")
    words = ["generate", "x", "--earlier", file, "--drafter", *options]
    assert "--earlier: " in refused(capsys, *words)
