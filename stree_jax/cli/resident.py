"""The process that `--keep` starts: it runs commands that other processes send it
(`attach`), and keeps the last model loaded.

It runs one command at a time, in its main thread, with the sender's standard streams,
folder and environment. A thread answers `BUSY` meanwhile. It ends when it has had
nothing to do for a while.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.cli.attach import BUSY, INTERRUPT, READY, RESIZED
from stree_jax.cli.loaded import keep_loaded

MOST_BYTES = 2**24  # of a request
REQUEST_S = 5.0  # seconds in which a request has to arrive
FIRST_S = 60.0  # seconds to wait for the first request


class Request(NamedTuple):
    """A command to run.

    Attributes:
      connection: the connection to its sender.
      streams: its standard input, output and error.
      about: arguments, folder and environment, as `attach` sends them.
    """

    connection: socket.socket
    streams: list[int]
    about: dict[str, Any]


class Resident:
    """Accepts commands and runs them."""

    def __init__(self, listening: socket.socket, path: Path) -> None:
        self.listening, self.path = listening, path
        self.requests: queue.Queue[Request] = queue.Queue()
        self.free = threading.Lock()  # held while a command runs, and at the end
        self.own = dict(os.environ)

    def serve(self) -> None:
        """Runs commands until none has come for as long as the last one asked."""
        threading.Thread(target=self._accept, daemon=True).start()
        seconds = FIRST_S
        while True:
            try:
                request = self.requests.get(timeout=seconds)
            except queue.Empty:
                if self.free.acquire(blocking=False):
                    break
                continue  # a request is arriving
            except KeyboardInterrupt:  # it came when its command had just ended
                continue
            seconds = float(request.about["seconds"])
            try:
                self._run(request)
            finally:
                self.free.release()
            if not seconds:
                break
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            if not self.free.acquire(blocking=False):
                with connection, suppress(OSError):
                    connection.sendall(BUSY)
                continue
            try:
                connection.sendall(READY)
                request = received(connection)
            except (OSError, ValueError, KeyError):
                connection.close()
                self.free.release()
                continue
            self.requests.put(request)

    def _run(self, request: Request) -> None:
        """Runs a command, and sends its exit code."""
        connection, done = request.connection, threading.Event()
        signals = threading.Thread(
            target=_raise_signals, args=(connection, done), daemon=True
        )
        code = 1
        with streams(request), surroundings(request.about, self.own):
            signals.start()
            try:
                code = _command(request.about["argv"])
            except BaseException:  # what `python` itself would print
                sys.excepthook(*sys.exc_info())
            finally:
                done.set()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
        with suppress(OSError):
            connection.sendall(b"%d\n" % code)
            connection.shutdown(socket.SHUT_RDWR)  # ends the thread
        signals.join()
        connection.close()


def received(connection: socket.socket) -> Request:
    """Reads a request from a connection.

    Raises:
      OSError, ValueError, KeyError: it does not arrive, or is malformed.
    """
    connection.settimeout(REQUEST_S)
    body, numbers, _, _ = socket.recv_fds(connection, 2**16, 3)
    try:
        while not body.endswith(b"\n"):
            part = connection.recv(2**16)
            if not part or len(body) > MOST_BYTES:
                raise ValueError("an incomplete request")
            body += part
        about = json.loads(body)
        if len(numbers) != 3 or not isinstance(about, dict):
            raise ValueError("a malformed request")
        float(about["seconds"]), about["argv"], about["environment"]  # KeyError
    except BaseException:
        for number in numbers:
            os.close(number)
        raise
    connection.settimeout(None)
    return Request(connection, list(numbers), about)


def _raise_signals(connection: socket.socket, done: threading.Event) -> None:
    """Raises the signals that the sender forwards, in the main thread. If the sender is
    gone, presses Ctrl-C until the command ends."""
    main = threading.main_thread().ident
    assert main is not None  # it runs
    while not done.is_set():
        try:
            byte = connection.recv(1)
        except OSError:
            byte = b""
        if done.is_set():
            return
        if byte == RESIZED:
            signal.pthread_kill(main, signal.SIGWINCH)
        elif byte in (INTERRUPT, b""):
            signal.pthread_kill(main, signal.SIGINT)
        if not byte:
            done.wait(1.0)


@contextmanager
def streams(request: Request) -> Iterator[None]:
    """Gives this process the standard streams of a request, and afterwards the null
    device."""
    for place, number in enumerate(request.streams):
        os.dup2(number, place)
        os.close(number)
    before = sys.stdin, sys.stdout, sys.stderr
    named = before[1].encoding, before[1].errors
    sys.stdin = open(0, encoding=before[0].encoding, closefd=False)
    sys.stdout = _writer(1, *named)
    sys.stderr = _writer(2, before[2].encoding, before[2].errors)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before
        null = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        os.close(null)


def _writer(number: int, encoding: str, errors: str | None) -> Any:
    at_once = number == 2 or os.isatty(number)
    return open(
        number,
        "w",
        buffering=1 if at_once else -1,
        encoding=encoding,
        errors=errors,
        closefd=False,
    )


@contextmanager
def surroundings(about: dict[str, Any], own: dict[str, str]) -> Iterator[None]:
    """Gives this process the folder, environment and umask of a request.

    Args:
      about: the request.
      own: the environment of this process.
    """
    os.environ.clear()
    os.environ.update(about["environment"])
    before = os.umask(int(about["umask"]))
    os.chdir(about["cwd"])
    try:
        yield
    finally:
        os.chdir("/")
        os.umask(before)
        os.environ.clear()
        os.environ.update(own)


def _command(argv: list[str]) -> int:
    from stree_jax.cli.main import console

    return console(argv)


def main() -> None:
    number, path = int(sys.argv[1]), Path(sys.argv[2])
    keep_loaded()
    with socket.socket(fileno=number) as listening:
        Resident(listening, path).serve()
    # Threads of XLA may still run, and nothing here needs a finaliser.
    os._exit(0)


if __name__ == "__main__":
    main()
