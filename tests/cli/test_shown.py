"""`stree-jax chat` on a terminal: reasoning is dimmed, calls of tools are readable."""

import io

import pytest

from stree_jax.cli import conversation
from stree_jax.cli import main as cli
from stree_jax.cli.shown import CALL, DIM, RESET, StyledParts
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.formats import FORMATS
from stree_jax.server.split import Splitter
from tests.support.answer_server import MARKS, write_answer

HERMES = next(f for f in FORMATS if f.opening == "<tool_call>" and f.write)
FORM = ChatFormat(tools=True, calls=HERMES, reasoning=("<think>", "</think>"))
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = {
    "Hi.": "Hi.",
    "<think>\nHm.\n</think>\n\nHi.": f"{DIM}Hm.{RESET}\n\nHi.",
    f"Look.\n{CALLED}": f'Look.\n{CALL}f({{"a": 1}}){RESET}',
    f"{CALLED}\n{CALLED.replace('f', 'g')}": (
        f'{CALL}f({{"a": 1}}){RESET}\n{CALL}g({{"a": 1}}){RESET}'
    ),
    f"{CALLED} Done.": f'{CALL}f({{"a": 1}}){RESET}\nDone.',
    "<think>Hm.</think>" + CALLED: f'{DIM}Hm.{RESET}\n\n{CALL}f({{"a": 1}}){RESET}',
    "A < b <thing>": "A < b <thing>",
    "<think>Never ends": f"{DIM}Never ends{RESET}",
}


def joined(text):
    """Returns a text in which a style that goes on is set once."""
    for style in (DIM, CALL):
        text = text.replace(RESET + style, "")
    return text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parts_have_styles(text, size):
    parts = StyledParts(Splitter(FORM, {}), None)
    ends = [*range(size, len(text), size)]
    found = "".join(parts.grown(text[:end], False) for end in ends)
    found += parts.grown(text, True)
    if "Done" in text and size > len(text):  # in one piece, text goes before calls
        return
    # A line break between parts may be part of the content already.
    assert joined(found).replace("\n", "") == TEXTS[text].replace("\n", "")
    if "think" in text and "/" in text:
        assert f"{RESET}\n\n" in found


def run(monkeypatch, capsys, path, lines, colours, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
    monkeypatch.setattr(conversation, "coloured", lambda stream: colours)
    argv = ["chat", "--model", str(path), "--drafter", "none", *options]
    assert cli.main(argv) == 0
    return capsys.readouterr()


ANSWER = [
    *("<think>", "Let me ", "think.", "</think>", "I ", "look. ", "<tool_", "call>"),
    *('{"name": ', '"now", "argu', 'ments": {}', "}</tool_call>"),
]
PLAIN = "\n".join(
    [
        "<think>Let me think.</think>I look. "
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
    ]
)
STYLED = f"{DIM}Let me think.{RESET}\n\nI look.\n{CALL}now({{}}){RESET}\n"


@pytest.mark.parametrize("special", [(), MARKS, ("<think>", "</think>")], ids=str)
def test_a_chat_on_a_terminal(tmp_path, monkeypatch, capsys, special):
    pieces = [p for p in ANSWER if p not in ("<tool_", "call>", "}</tool_call>")]
    pieces[6:6] = ["<tool_call>"]
    pieces += ["}", "</tool_call>"]
    path = write_answer(tmp_path / "model", pieces, special=special)
    found = run(monkeypatch, capsys, path, ["x"], True)
    assert joined(found.out) == STYLED
    plain = run(monkeypatch, capsys, path, ["x"], False).out
    assert "\x1b" not in plain
    if not special:
        assert plain == PLAIN


def test_a_continued_answer_and_a_stop_string(tmp_path, monkeypatch, capsys):
    path = write_answer(tmp_path / "model", ANSWER, special=())
    limit = ("--max-new-tokens", "3")
    found = run(monkeypatch, capsys, path, ["x", *["/more"] * 4], True, *limit)
    assert joined(found.out.replace("\n", "")) == STYLED.replace("\n", "")
    found = run(monkeypatch, capsys, path, ["x"], True, "--stop", "look")
    assert joined(found.out) == f"{DIM}Let me think.{RESET}\n\nI \n"
    found = run(monkeypatch, capsys, path, ["x"], True, "--stop", "think.")
    assert joined(found.out) == f"{DIM}Let me{RESET}\n"
