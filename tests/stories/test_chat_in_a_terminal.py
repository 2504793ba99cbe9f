"""A stranger's five minutes with `stree-jax chat`, in a pseudo-terminal.

What was sent as a message is read from the file that /save writes.
"""

import json
import os
import stat
import sys

import pytest

from tests.support.pseudo_terminal import (
    CTRL_C,
    CTRL_D,
    LEFT,
    UP,
    PseudoTerminal,
    pasted,
)
from tests.support.table_models import byte_level, follow, padded_size, write_llama

# The model continues the last character of the last message.
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Says "bcd" after "a" and ends; counts without end after a digit."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [*"abcd", "</s>"], rest=2)
    digits = [tokenizer.token_to_id(digit) for digit in "01234567890"]
    for one, following in zip(digits[:-1], digits[1:], strict=True):
        chain[one] = following
    path = tmp_path_factory.mktemp("models") / "llama"
    write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def chat(model, tmp_path):
    """Returns a function that begins a chat with the given options."""

    def begin(*options):
        words = ["chat", "--model", str(model), "--drafter", "none", *options]
        command = [sys.executable, "-m", "stree_jax", *words]
        env = os.environ | {"STREE_JAX_CACHE": str(tmp_path / "cache"), "TERM": "xterm"}
        terminal = PseudoTerminal(command, env)
        terminal.wait_for("Ctrl-D ends the chat")
        return terminal

    return begin


def said(file, role="user"):
    return [m["content"] for m in json.loads(file.read_text()) if m["role"] == role]


def test_five_minutes(chat, tmp_path):
    file, history = tmp_path / "chat.json", tmp_path / "cache" / "chat_history"
    with chat("--context", "16384") as t:
        t.type(f"a{LEFT}x\r")  # edits the line
        t.wait_for("bcd\r\n[4 tokens")
        t.type(f"{UP}\r")  # the line before
        t.wait_for("bcd\r\n[4 tokens")
        t.type('"""\rone\r/undo a"""\r')
        t.wait_for("bcd\r\n[4 tokens")
        t.type(pasted("def f():\n  return a") + "\r")
        t.wait_for("bcd\r\n[4 tokens")
        t.type("/usr/bin a\r")
        t.wait_for("/usr/bin is not a command; /help lists the commands")
        t.type("//usr/bin a\r")
        t.wait_for("bcd\r\n[4 tokens")
        t.type(f"/save {file}\r")
        t.wait_for("saved 10 messages")
        messages = ["xa", "xa", "one\n/undo a", "def f():\n  return a", "/usr/bin a"]
        assert said(file) == messages and said(file, "assistant") == ["bcd"] * 5

        t.type("0\r")
        t.wait_for("123456789012")
        t.type(CTRL_C)
        t.wait_for("interrupted]")
        t.wait_for("\n>")
        t.type(CTRL_C)  # nothing to clear
        t.wait_for("\n>")
        t.type(f"half a line{CTRL_C}/save {file}\r")
        t.wait_for("saved 12 messages")
        count = said(file, "assistant")[-1]
        assert len(count) >= 12 and ("1234567890" * len(count)).startswith(count)
        t.type("/set max-new-tokens 3\r")
        t.wait_for("max-new-tokens 3")
        t.type("/more\r")
        t.wait_for("cut after 3 tokens")
        t.type(f"/save {file}\r")
        t.wait_for("saved 12 messages")
        longer = said(file, "assistant")[-1]
        assert longer == ("1234567890" * len(count))[: len(count) + 3]

        t.type("/undo\r")
        t.wait_for("removed the last message and its answer: 0")
        t.type("/regen\r")
        t.wait_for("temperature is 0")
        t.wait_for("bcd\r\n[3 tokens")
        t.type(f"/save {file}\r")
        t.wait_for("saved 10 messages")
        assert said(file) == messages
        t.type("/clear\r/more\r")
        t.wait_for("no unfinished answer")
        t.type(f"/load {file}\r")
        t.wait_for("loaded 10 messages")
        t.type("7\r")
        t.wait_for("890\r\n[3 tokens")
        t.type("/bye\r")
        assert t.end() == 0
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "Traceback" not in t.seen


def test_a_full_context_and_the_history_of_an_earlier_chat(chat, tmp_path):
    with chat("--context", "64") as t:
        t.type("0\r")
        t.wait_for("cut: the context of 64 tokens is full; /undo or /clear makes room")
        t.wait_for("\n>")
        t.type(CTRL_D)
        assert t.end() == 0
    with chat("--context", "64") as t:
        t.type(f"{UP}\r")
        assert "1234567890" in t.wait_for("is full")
        t.type("/more\r")
        t.wait_for("the context is full; /undo")
        t.type("a\r")
        t.wait_for("the message does not fit")
        t.type("/undo\r")
        t.wait_for("answer: 0")
        t.type("a\r")
        t.wait_for("bcd\r\n[4 tokens")
        t.wait_for("\n>")
        t.type(CTRL_D)
        assert t.end() == 0
