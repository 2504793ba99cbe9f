"""What commands share: options with their defaults in their help, a word on stderr."""

import argparse
import contextlib
import sys
from typing import Any


def option(
    p: argparse.ArgumentParser, name: str, kind: type, default: Any, text: str
) -> None:
    """Add an option whose help ends with its default; where that is None, `text` may
    say what happens without the option."""
    if default is not None:
        text += "; default %(default)s"
    p.add_argument(name, type=kind, default=default, help=text)


def tell(text: str) -> None:
    """Prints a line on stderr, if it is open; `print` would take stdout.

    If nobody reads stderr any more, work goes on: only the output needs a reader.
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr)
