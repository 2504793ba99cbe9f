"""What the user of `stree-jax chat` types, pipes or pastes: messages and commands."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stree_jax.cli.chat_files import history_file
from stree_jax.cli.terminal import read_stdin

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

QUOTES = '"""'  # around a message of several lines
PROMPT = "> "
NEXT_LINE = ". "

# Commands, as /help lists them.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/help": "list the commands",
        "/regen": "answer the last message again",
        "/more": "continue an answer that was cut or interrupted",
        "/undo": "remove the last message and its answer",
        "/clear": "forget the conversation and start a new one (also /new, /reset)",
        "/system TEXT": "start a new conversation with this system message",
        "/set KEY VALUE": "change a setting, such as temperature (/set lists them)",
        "/show": "print the settings and the system message",
        "/stats": "speed and acceptance length so far, and the tokens in use",
        "/save FILE": "write the conversation to a JSON file",
        "/load FILE": "continue a conversation from a JSON file",
        "/bye": "end the chat (also /exit, /quit and Ctrl-D)",
    }
)
ALIASES = MappingProxyType(
    {
        "/new": "/clear",
        "/reset": "/clear",
        "/exit": "/bye",
        "/quit": "/bye",
        "/?": "/help",
        "/regenerate": "/regen",
        "/continue": "/more",
    }
)
NAMES = frozenset(command.partition(" ")[0] for command in COMMANDS)
KEYS_HELP = f"""\
several lines in a message: paste them, write {QUOTES} around them, or press Alt-Enter
a message that begins with a slash: write two slashes
Ctrl-C ends an answer or clears the line; arrow keys edit it and find earlier ones"""


def command_of(text: str) -> tuple[str, str] | None:
    """Splits a command into its name and its argument.

    A line that begins with a slash is a command, known or not, unless it begins with
    two slashes. Text of several lines is a command if it begins with a known one.

    Returns:
      the command's name without aliases, and its argument; None if the text is a
      message.
    """
    text = text.strip()
    if not text.startswith("/") or text.startswith("//"):
        return None
    name, *rest = text.split(maxsplit=1)
    name = ALIASES.get(name.lower(), name.lower())
    if "\n" in text and name not in NAMES:
        return None
    return name, unquoted("".join(rest))


def message_of(text: str) -> str:
    """Returns the message that the user typed: without the triple quotes around a
    message of several lines, and with one slash at the start in place of two."""
    stripped = text.strip()
    if stripped.startswith("//") and "\n" not in stripped:
        return stripped[1:]
    return unquoted(text)


def unquoted(text: str) -> str:
    """Returns a text without triple quotes around it, if it has them nowhere else."""
    inner = text.strip()
    if len(inner) < 2 * len(QUOTES) or inner.count(QUOTES) != 2:
        return text
    if not (inner.startswith(QUOTES) and inner.endswith(QUOTES)):
        return text
    inner = inner.removeprefix(QUOTES).removesuffix(QUOTES)
    return inner.removeprefix("\n").removesuffix("\n")


def is_open(text: str) -> bool:
    """True if the input needs more lines: triple quotes were opened at the start of a
    message, or of a command's argument, and are not closed yet."""
    start = text.strip()
    if start.startswith("/"):
        start = start[start.find(QUOTES) :] if f" {QUOTES}" in start else ""
    return start.startswith(QUOTES) and start.count(QUOTES) == 1


def is_terminal(stream: Any) -> bool:
    """True if a standard stream is open and is a terminal."""
    return stream is not None and stream.isatty()


def reader(keeps_history: bool) -> Callable[[], str]:
    """Returns the function that reads the next message or command.

    It raises EOFError at the end of the input. In a terminal it edits lines, and raises
    KeyboardInterrupt for Ctrl-C.

    Args:
      keeps_history: True to keep typed lines in a file for later chats.
    """
    if is_terminal(sys.stdin):
        # Answers alone go to a redirected stdout.
        shown = next((s for s in (sys.stdout, sys.stderr) if is_terminal(s)), None)
        if shown is not None:
            return editor(shown, keeps_history).prompt
    return next_text


def next_text() -> str:
    """Reads the next line of standard input, or the lines within triple quotes."""
    if is_terminal(sys.stdin) and sys.stderr is not None:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    text = ""
    while not text or is_open(text):
        line = read_stdin(line=True)
        if not line and text:
            raise ValueError(f"standard input: {QUOTES} begins a message without end")
        if not line:
            raise EOFError
        text += line
    return text.removesuffix("\n")


def editor(shown: Any, keeps_history: bool) -> "PromptSession[str]":
    """Returns the line editor of a terminal.

    A paste is inserted as it is, line ends included, in terminals with bracketed paste.

    Args:
      shown: the stream to draw on.
      keeps_history: as in `reader`.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(stdout=shown)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # no menus are drawn, so the position is not needed
    session: PromptSession[str] = PromptSession(
        PROMPT,
        prompt_continuation=NEXT_LINE,
        multiline=Condition(lambda: is_open(session.default_buffer.text)),
        key_bindings=keys,
        history=history(history_file() if keeps_history else None),
        output=output,
        enable_suspend=True,
    )
    return session


def history(file: Path | None) -> "History":
    """Returns the history of typed lines, in a file if one is given. A line that cannot
    be written, for example to a full disk, is forgotten at the end of the chat."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, ValueError):
                super().store_string(string)

    return InMemoryHistory() if file is None else Kept(str(file))
