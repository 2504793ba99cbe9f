"""Functions that all commands use: messages on standard error, and examples in the
help."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stree_jax.checkpoints.draft_tokens import DraftVocabulary


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


def vocabulary_of(args: argparse.Namespace) -> "DraftVocabulary | None":
    """Returns the draft vocabulary that the options name, or None. Reads its text."""
    from stree_jax.checkpoints.draft_tokens import DraftVocabulary
    from stree_jax.convert.base.files import read_text

    file = args.draft_vocab_text
    if args.draft_vocab is None:
        if file is not None:
            raise ValueError("--draft-vocab-text: add --draft-vocab N")
        return None
    return DraftVocabulary(args.draft_vocab, None if file is None else read_text(file))
