"""Which typed, pasted or piped text is a command, and which is a message."""

import io

import pytest

from stree_jax.cli.chat_files import MOST_ENTRIES, MOST_HISTORY, newest_entries
from stree_jax.cli.chat_input import command_of, is_open, message_of, next_text


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", ("/help", "")),
        ("/?", ("/help", "")),
        ("/reset", ("/clear", "")),
        ("/Quit ", ("/bye", "")),
        ("/system  be kind ", ("/system", "be kind")),
        ('/system """be\nkind"""', ("/system", "be\nkind")),
        ("/set temperature 0.8", ("/set", "temperature 0.8")),
        ("/save a b.json", ("/save", "a b.json")),
        # Unknown commands are errors, never messages
        ("/think about it", ("/think", "about it")),
        ("/usr/bin", ("/usr/bin", "")),
        ("/no_think", ("/no_think", "")),
        ("/* a comment", ("/*", "a comment")),
        ("/", ("/", "")),
        ("/ x", ("/", "x")),
    ],
)
def test_commands(line, command):
    assert command_of(line) == command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a /help", "a /help"),
        ("//help", "/help"),
        ("//", "/"),
        ("// a comment\nx = 1", "// a comment\nx = 1"),
        ("/usr/bin/env sh\necho", "/usr/bin/env sh\necho"),
        ('"""one\n/undo"""', "one\n/undo"),
        ('"""\none\n\n"""', "one\n"),
        ('"""/help"""', "/help"),
        ('""""""', ""),
        ('"""A module."""\nx = 1', '"""A module."""\nx = 1'),
        ('"""A."""\nx = """B"""', '"""A."""\nx = """B"""'),
        ('say """x"""', 'say """x"""'),
        ("  indented", "  indented"),
        ("", ""),
    ],
)
def test_messages(text, message):
    assert command_of(text) is None
    assert message_of(text) == message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one"""', False),
        ('say """', False),
        ('/system """be', True),
        ('/system """be"""', False),
        ("/system be", False),
    ],
)
def test_text_that_more_lines_follow(text, expected):
    assert is_open(text) is expected


def test_piped_lines_within_quotes_are_one_message(monkeypatch):
    lines = 'x\n"""a\n\nb"""\n/bye\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert [next_text() for _ in range(3)] == ["x", '"""a\n\nb"""', "/bye"]
    with pytest.raises(EOFError):
        next_text()
    monkeypatch.setattr("sys.stdin", io.StringIO('"""a\nb'))
    with pytest.raises(ValueError, match="begins a message without end"):
        next_text()


def entries(count, text):
    """Entries as prompt_toolkit writes them."""
    return b"".join(b"\n# time\n+%s %d\n" % (text, i) for i in range(count))


def test_the_history_is_bounded():
    short = entries(9, b"x")
    assert newest_entries(short) == short and newest_entries(b"") == b""
    many = newest_entries(entries(MOST_ENTRIES + 5, b"x"))
    assert many.count(b"# time") == MOST_ENTRIES // 2
    assert many.endswith(b"+x %d\n" % (MOST_ENTRIES + 4))
    large = newest_entries(entries(40, b"x" * (MOST_HISTORY // 30)))
    assert MOST_HISTORY / 3 < len(large) <= MOST_HISTORY // 2
    assert newest_entries(large) == large
    assert newest_entries(entries(1, b"x" * MOST_HISTORY)) == b""
