"""Calls of which everything is recorded: errors, warnings, stderr, opened pipes."""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kept for the whole run: a logger created within a call keeps the stderr that it finds.
STDERR = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)

WATCHER = """
import os, select, sys
opened = set()
while not select.select([0], [], [], 0.01)[0]:
    for pipe in sys.argv[1:]:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            opened.add(pipe)
        except OSError:  # nobody reads it
            pass
print(*sorted(opened), sep="\\n")
"""


@dataclass
class Outcome:
    """The result of one call on a case.

    Attributes:
      stderr: everything written to file descriptor 2, by Python or other code.
    """

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    warned: tuple[warnings.WarningMessage, ...] = ()
    stderr: str = ""


def attempt(call: Callable[[], Any]) -> Outcome:
    """Makes a call and records what happens. Only KeyboardInterrupt is raised."""
    outcome = Outcome()
    with redirected() as file, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        began = time.perf_counter()
        try:
            outcome.value = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Rust panics are not Exceptions
            outcome.error = error
        outcome.seconds = time.perf_counter() - began
        STDERR.flush()
        file.seek(0)
        outcome.stderr = file.read().decode(errors="replace")
    outcome.warned = tuple(warned)
    return outcome


@contextlib.contextmanager
def redirected() -> Iterator[Any]:
    """Redirects the stderr of the whole process to a file."""
    old = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file, contextlib.redirect_stderr(STDERR):
            os.dup2(file.fileno(), 2)
            yield file
    finally:
        STDERR.flush()
        os.dup2(old, 2)
        os.close(old)


@contextlib.contextmanager
def unraisable() -> Iterator[None]:
    """Sends exceptions that nobody can catch to stderr, also under pytest.

    Orbax leaves such coroutines when it fails on a directory without checksums.
    """
    old, sys.unraisablehook = sys.unraisablehook, sys.__unraisablehook__
    try:
        yield
        attempt(gc.collect)
    finally:
        sys.unraisablehook = old


@contextlib.contextmanager
def watched(directory: Path) -> Iterator[list[str]]:
    """Stops reads of named pipes. Afterwards the list has the paths of opened pipes.

    A reader of such a pipe would wait forever, and may hold Python's lock meanwhile, so
    another process opens the other end.
    """
    opened: list[str] = []
    pipes = [str(file) for file in directory.rglob("*") if file.is_fifo()]
    if not pipes:
        yield opened
        return
    command = [sys.executable, "-S", "-c", WATCHER, *pipes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield opened
        finally:
            opened += process.communicate("")[0].split("\n")[:-1]
    opened[:] = filter(None, opened)
