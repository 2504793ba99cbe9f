"""`stree-jax chat`: the banner, commands, statistics, and a stdout of answers alone."""

import io
import re

import pytest

from stree_jax.cli import conversation
from stree_jax.cli import main as cli
from stree_jax.cli.chat_input import COMMANDS, next_text
from stree_jax.cli.conversation import parameters_in_words
from stree_jax.cli.speeds import Speed
from tests.support.table_models import byte_level, follow, padded_size, write_llama

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}a"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Says "bcd" after "a", and ends."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [*"abcd", "</s>"], rest=2)
    path = tmp_path_factory.mktemp("models") / "llama"
    write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The same model without a chat template: it answers "d\\n" by its end."""
    tokenizer = byte_level()
    chain = follow(tokenizer, ["Ċ", *"abcd", "</s>"], rest=2)
    path = tmp_path_factory.mktemp("models") / "bare"
    return write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)


def chat(monkeypatch, capsys, model, lines, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
    argv = ["chat", "--model", str(model), "--drafter", "none", *options]
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_banner_names_the_models_on_stderr(model, monkeypatch, capsys):
    code, out, err = chat(monkeypatch, capsys, model, [])
    assert (code, out) == (0, "")
    first, second, last = err.splitlines()
    assert first.startswith(f"stree-jax chat with {model} (") and "float32" in first
    assert first.endswith("drafter: none")
    assert second == "context of 4096 tokens, answers until the model ends them"
    assert last == "reading messages from standard input, one on each line"


def test_stdout_of_a_pipe_has_the_answers_alone(model, monkeypatch, capsys):
    lines = ["x", "/stats", "/new", "/help", "/nonsense", "/system be kind", "y"]
    code, out, err = chat(monkeypatch, capsys, model, lines)
    assert (code, out) == (0, "bcd\nbcd\n")
    assert err.count("acceptance length 1.00") == 3  # two answers and /stats
    for command in COMMANDS:
        assert f"  {command} " in err
    assert "/nonsense is not a command; /help lists the commands" in err
    assert "\x1b" not in err


def test_speeds_are_printed_after_each_answer(model, monkeypatch, capsys):
    _, _, err = chat(monkeypatch, capsys, model, ["x", "y", "/stats"])
    first, second, stats, used = err.splitlines()[-4:]
    assert first == "[4 tokens, acceptance length 1.00]"  # waited for compilation
    assert re.fullmatch(r"\[4 tokens, \d+ tokens/s, acceptance length 1\.00\]", second)
    assert stats.startswith("2 answers: 8 tokens, ") and used.endswith(" tokens")


@pytest.mark.parametrize("end", ["/exit", "/quit", " /exit ", "/bye", "/BYE"])
def test_exit_ends_the_chat(model, end, monkeypatch, capsys):
    code, out, _ = chat(monkeypatch, capsys, model, [end, "x"])
    assert (code, out) == (0, "")


def prompts_of(monkeypatch):
    """Records the prompt of every answer and whether it continued a past."""
    found, real = [], conversation.stream

    def recorded(model, prompts, **options):
        text = model.tokenizer.decode(prompts[0], skip_special_tokens=False)
        found.append((text, options["past"] is not None))
        return real(model, prompts, **options)

    monkeypatch.setattr(conversation, "stream", recorded)
    return found


@pytest.mark.parametrize("new", ["/new", "/reset", "/clear"])
def test_new_forgets_the_conversation_and_keeps_the_system_message(
    model, new, monkeypatch, capsys
):
    found = prompts_of(monkeypatch)
    lines = ["x", "y", new, "z"]
    chat(monkeypatch, capsys, model, lines, "--system", "hi")
    assert found[0] == ("shi\nux\na", False)
    assert "ux" not in found[2][0] and found[2] == ("shi\nuz\na", False)


def test_a_system_message_starts_a_new_conversation(model, monkeypatch, capsys):
    found = prompts_of(monkeypatch)
    lines = ["/system", "x", "/system be kind", "/system", "y"]
    _, _, err = chat(monkeypatch, capsys, model, lines)
    assert found == [("ux\na", False), ("sbe kind\nuy\na", False)]
    assert "there is no system message" in err
    assert "started a new conversation with this system message\nbe kind\n" in err


def test_a_refused_system_message_is_a_line_and_the_chat_continues(
    model, monkeypatch, capsys, tmp_path
):
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}" + TEMPLATE
    )
    try:
        code, out, err = chat(monkeypatch, capsys, model, ["/system be kind", "x"])
    finally:
        (model / "chat_template.jinja").write_text(TEMPLATE)
    assert (code, out) == (0, "bcd\n") and "/system: chat template: no system" in err


def test_without_a_template_there_is_no_system_message(bare, monkeypatch, capsys):
    code, out, err = chat(monkeypatch, capsys, bare, ["/system be kind", "x"])
    assert (code, out) == (0, "abcd\n")
    assert "no chat template: each message is continued as plain text" in err
    assert "so it takes no system message" in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_statistics_are_dimmed_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", Terminal())
    conversation.tell_dimmed("[1 token]")
    assert conversation.sys.stderr.getvalue() == "\x1b[2m[1 token]\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr", Terminal())
    conversation.tell_dimmed("[1 token]")
    assert conversation.sys.stderr.getvalue() == "[1 token]\n"


def test_a_prompt_for_input_goes_to_stderr_if_stdout_is_redirected(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("hello\n"))
    assert next_text() == "hello"
    assert capsys.readouterr() == ("", "> ")
    with pytest.raises(EOFError):
        next_text()


def test_speeds_add_up():
    total = Speed(4, 2, 4, 0.5).plus(Speed(6, 2)).plus(Speed(1, 1, 1, 0.5))
    assert str(total) == "11 tokens, 5 tokens/s, acceptance length 2.20"
    assert str(Speed(1, 1)) == "1 token, acceptance length 1.00"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (870, "870"),
        (893_540, "894 K"),
        (9_814_016, "9.81 M"),
        (8_030_261_248, "8.03 B"),
    ],
)
def test_numbers_of_parameters(count, words):
    assert parameters_in_words(count) == words
