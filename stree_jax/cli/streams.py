"""Standard streams, in any state that a terminal, pipe or script leaves them, and
Ctrl-C."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def open_closed_streams() -> None:
    """Points closed standard streams (`>&-`, `2>&-`) at the null device.

    Otherwise the next file that is opened would get their file descriptor, and
    everything that is printed would be written to that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # `open` takes the lowest free descriptor: the closed one
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


RAISING = ("strict", "surrogateescape")  # error handlers that raise


@contextmanager
def printable() -> Iterator[None]:
    """Lets standard output accept every character. A character that its encoding lacks,
    such as é on an ASCII terminal, is then written as an escape (\\xe9)."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream.errors not in RAISING:
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
    """Discards output that is not written yet, so that the interpreter does not fail
    again when it flushes at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def on_ctrl_c(press: Callable[[], None]) -> Iterator[None]:
    """Calls a function when Ctrl-C is pressed in a `with` block, instead of raising
    KeyboardInterrupt. Only the main thread receives Ctrl-C, so in other threads nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: press())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def noticing_ctrl_c() -> Iterator[threading.Event]:
    """Sets an event when Ctrl-C is pressed in a `with` block. A second Ctrl-C raises
    KeyboardInterrupt.

    A KeyboardInterrupt within JAX's own code can become another exception.
    """
    pressed = threading.Event()

    def press() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    with on_ctrl_c(press):
        yield pressed
