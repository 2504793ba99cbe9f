"""What commands share: options with their defaults in their help, a word on stderr."""

import argparse
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
    """Prints to standard error, if it is open; `print` would take standard output."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)
