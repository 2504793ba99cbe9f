"""Functions that all commands use: messages on standard error, and examples in the
help."""

import contextlib
import sys


def print_status(text: str) -> None:
    """Prints a line on standard error, if it is open.

    If standard error was closed, work goes on: only the output needs a
    reader.
    """
    if sys.stderr is None:  # `print` would write to standard output
        return
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr)


def notes(text: str, *commands: str) -> str:
    """Returns the end of a command's help: paragraphs, then example commands."""
    title = "example:" if len(commands) == 1 else "examples:"
    lines = [title, *(f"  {command}" for command in commands)]
    return "\n".join([*([text.strip("\n"), ""] if text else []), *lines])
