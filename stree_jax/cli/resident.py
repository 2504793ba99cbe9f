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
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.cli.attach import BUSY, INTERRUPT, READY, RESIZED
from stree_jax.cli.common import print_status
from stree_jax.cli.compile_cache import keep_programs
from stree_jax.cli.loaded import keep_loaded

MOST_BYTES = 2**24  # of a request
REQUEST_S = 5.0  # seconds in which a request has to arrive
MOST_PRESSES = 30  # of Ctrl-C, one a second, for a command whose sender is gone
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
        self.is_running = False  # a command, which Ctrl-C interrupts
        self.is_broken = False  # a command ended by an exception of ours
        self.own = dict(os.environ)

    def serve(self) -> None:
        """Runs commands until none has come for as long as the last one asked."""
        seconds = FIRST_S
        while True:
            try:
                request = self.requests.get(timeout=seconds)
            except queue.Empty:
                if self.free.acquire(blocking=False):
                    break
                continue  # a request is arriving
            seconds = float(request.about["seconds"])
            self._run(request)
            if not seconds or self.is_broken:
                break  # `free` stays locked: a command that comes now runs alone
            self.free.release()
        # The socket last: while it is there, no command starts another process.
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def interrupt(self, *_: object) -> None:
        """Handles SIGINT, while a command does not do so itself.

        Raises:
          KeyboardInterrupt: a command runs. Others come too late for theirs.
        """
        if self.is_running:
            raise KeyboardInterrupt

    def accept(self) -> None:
        """Accepts commands, in a thread."""
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
            try:
                self.is_running = True
                signals.start()
                code = _command(request.about["argv"])
            except KeyboardInterrupt:  # before the command handled it
                print_status("stree-jax: interrupted")
                code = 130
            except BaseException:  # what `python` itself would print
                sys.excepthook(*sys.exc_info())
                self.is_broken = True
            finally:
                self.is_running = False
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
    gone, closes its streams and presses Ctrl-C until the command ends. If it does not,
    ends this process."""
    main = threading.main_thread().ident
    assert main is not None  # it runs
    presses = 0
    while not done.is_set():
        try:
            byte = connection.recv(1)
        except OSError:
            byte = b""
        if done.is_set():
            return
        if byte == RESIZED:
            signal.pthread_kill(main, signal.SIGWINCH)
        elif byte == INTERRUPT:
            signal.pthread_kill(main, signal.SIGINT)
        elif not byte:
            _to_null()  # a chat that waits for input then reads its end
            signal.pthread_kill(main, signal.SIGINT)
            done.wait(1.0)
            presses += 1
            if presses > MOST_PRESSES:
                os._exit(1)


@contextmanager
def streams(request: Request) -> Iterator[None]:
    """Gives this process the standard streams of a request, and afterwards the null
    device."""
    for place, number in enumerate(request.streams):
        os.dup2(number, place)
        os.close(number)
    terminal = _terminal()
    before = sys.stdin, sys.stdout, sys.stderr
    named = before[1].encoding, before[1].errors
    sys.stdin = open(0, encoding=before[0].encoding, closefd=False)
    if not request.about.get("has_input", True):
        sys.stdin = None
    sys.stdout = _writer(1, *named)
    sys.stderr = _writer(2, before[2].encoding, before[2].errors)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before
        if terminal is not None:
            number, modes = terminal
            with suppress(OSError, termios.error):
                termios.tcsetattr(number, termios.TCSADRAIN, modes)
            os.close(number)
        _to_null()


def _to_null() -> None:
    """Makes the null device the standard streams."""
    null = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(null, place)
    os.close(null)


def _terminal() -> tuple[int, Any] | None:
    """Returns a descriptor of the terminal that is standard input, with its modes,
    which an interrupted prompt may leave changed; None if it is no terminal."""
    try:
        modes = termios.tcgetattr(0)
        return os.dup(0), modes
    except (OSError, termios.error):
        return None


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


def _import() -> None:
    """Imports what commands need, before any of them can be interrupted: a module whose
    import was interrupted stays broken."""
    keep_programs()  # before jax is imported
    import jax

    import stree_jax.cli.chat_run
    import stree_jax.cli.terminal  # noqa: F401  # for commands

    with suppress(RuntimeError):  # a command says what is wrong
        jax.devices()


def main() -> None:
    # A script's background job, which may have started this process, ignores it.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    number, path = int(sys.argv[1]), Path(sys.argv[2])
    keep_loaded()
    with socket.socket(fileno=number) as listening:
        resident = Resident(listening, path)
        signal.signal(signal.SIGINT, resident.interrupt)
        threading.Thread(target=resident.accept, daemon=True).start()
        _import()
        resident.serve()
    # Threads of XLA may still run, and nothing here needs a finaliser.
    os._exit(0)


if __name__ == "__main__":
    main()
