"""Standard streams as a terminal, a pipe or a script leaves them to us."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_closed_streams() -> None:
    """Points closed standard streams (`>&-`, `2>&-`) at the null device.

    Otherwise the next file that is opened takes their number, and is written to by
    whatever prints to standard output or standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is the one that is closed
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


REFUSE = ("strict", "surrogateescape")  # ways that raise for characters of no code


@contextmanager
def printable() -> Iterator[None]:
    """Lets standard output take every character: one that its encoding lacks, as an
    ASCII terminal lacks most, is written as an escape (\\xe9) instead of an error."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream.errors not in REFUSE:
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # its reader is gone, or the disk is full
            stream.reconfigure(errors=before)


def drop_output() -> None:
    """Lets what is still to be written go nowhere, so that the interpreter's end does
    not fail to write it again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
