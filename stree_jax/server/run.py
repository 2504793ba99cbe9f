"""Runs the server process: its socket, start, signals and shutdown.

The server listens at once. While a thread loads the model and compiles, requests for
text wait. The same thread then compiles the programs that the first requests do not
need. The main thread runs the event loop, so that a signal can end the process at any
time.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from stree_jax.server.connection import Connection
from stree_jax.server.starting import UntilReady

if TYPE_CHECKING:
    from stree_jax.server.engine import Engine

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that a shutdown waits for the engine, which stops only between two calls of
# the compiled decoding loop.
STOP_S = 60.0


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address and does not listen yet.

    Raises:
      ValueError: the address is in use or not available.
    """
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: names too long for DNS
        if sock is not None:
            sock.close()
        problem = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{host or repr(host)}:{port}: {problem}; use another --host or --port"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Returns the base URL for clients, with an IPv6 address in brackets."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/v1"


@dataclass(frozen=True)
class Ready:
    """A loaded server.

    Attributes:
      app: the application.
      engine: the engine, whose batch is warm and whose thread is not started.
      line: message to print, which says that the server is ready.
      further: functions that compile further programs. They are called in turn once
        requests are answered, until the server stops.
      closing: functions that are called when the engine has stopped.
    """

    app: ASGIApp
    engine: "Engine"
    line: str
    further: Sequence[Callable[[], object]] = ()
    closing: Sequence[Callable[[], object]] = ()


Load = Callable[[Callable[[str], None]], Ready]


class _Abandoned(Exception):
    """Raised in the loading thread to end it, because the server stops before it is
    ready."""


class _Loading(threading.Thread):
    """The thread that loads the model and compiles.

    Attributes:
      ready: the loaded server, or None while it is loading.
      error: the exception if loading failed, else None.
    """

    def __init__(
        self, load: Load, front: UntilReady, say: Callable[[str], None], stop: Callable
    ) -> None:
        """Does not start the thread.

        Args:
          load: loads the server.
          front: answers requests, and receives the application.
          say: prints a message.
          stop: ends the event loop. Called if loading fails or the engine stops.
        """
        # A daemon, because a compilation cannot be interrupted and must not delay the
        # exit.
        super().__init__(name="loading", daemon=True)
        self.load, self.front, self.say, self.stop = load, front, say, stop
        self.ready: Ready | None = None
        self.error: BaseException | None = None
        self._lock, self._abandoned = threading.Lock(), False

    def run(self) -> None:
        try:
            ready = self.load(self._say)
            self._open(ready)
            self._compile_further(ready)
        except _Abandoned:
            return
        except BaseException as error:
            self.error = error
            self.stop()

    def _open(self, ready: Ready) -> None:
        with self._lock:
            if self._abandoned:
                return
            self.ready = ready
            ready.engine.on_death = lambda reason: self.stop()
            ready.engine.start()
            self.front.open(ready.app)
        self.say(ready.line)

    def _compile_further(self, ready: Ready) -> None:
        """Calls `ready.further`. A failure is only logged: a request that needs the
        program compiles it again, and gets the error."""
        for compiles in ready.further:
            if self._abandoned:
                return
            try:
                compiles()
            except Exception as error:
                log.warning("a program could not be compiled: %s", error)

    def _say(self, text: str) -> None:
        if self._abandoned:
            raise _Abandoned
        self.say(text)

    def abandon(self) -> bool:
        """Ends the thread before its next message. Returns True if the server was
        neither ready nor failed."""
        with self._lock:
            self._abandoned = True
            return self.ready is None and self.error is None


class _Server(uvicorn.Server):
    """A uvicorn server that shuts down gracefully on the first signal, and at once on
    the second."""

    def __init__(
        self,
        config: uvicorn.Config,
        say: Callable[[str], None],
        listening: Callable[[], None],
        front: UntilReady,
    ) -> None:
        """Makes a server.

        Args:
          config: uvicorn's settings.
          say: prints a message.
          listening: called once the socket accepts connections.
          front: answers requests. It is closed at the first signal.
        """
        super().__init__(config)
        self.say, self.listening, self.front = say, listening, front

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self.front.close()
        grace = self.config.timeout_graceful_shutdown
        self.say(f"stopping within {grace} s (signal again to stop at once)")


def run(
    load: Load,
    sock: socket.socket,
    say: Callable[[str], None],
    grace_s: int,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    front: UntilReady | None = None,
) -> int:
    """Listens, loads, and serves until a signal arrives or the engine stops.

    Args:
      load: loads the server. Called in a thread, with a function that prints progress
        messages.
      sock: a socket from `bound_socket`, which is closed at the end.
      say: prints a message.
      grace_s: seconds that running requests have after a signal.
      around: adds middleware, also for answers before the server is ready.
      front: holds requests until the server is ready. If None, with default limits.

    Returns:
      The exit code: 1 if the engine stopped after failures, else 0.

    Raises:
      Exception: any exception of `load`.
    """
    front = UntilReady() if front is None else front
    config = uvicorn.Config(
        around(front),
        http=Connection,
        ws="none",
        log_config=None,  # use the logging configuration of the process
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
    )

    def stop() -> None:
        front.close()
        server.should_exit = True

    def listening() -> None:
        say(f"listening on {url_of(sock)} (loading; requests wait until it is ready)")
        loading.start()

    server = _Server(config, say, listening, front)
    loading = _Loading(load, front, say, stop)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
        abandoned, ready = loading.abandon(), loading.ready
        ended = ready is None or ready.engine.stop(STOP_S)
        for close in () if ready is None else ready.closing:
            close()
    if loading.error is not None:
        raise loading.error
    dead = None if ready is None else ready.engine.dead
    code = 0 if dead is None else 1
    if loading.is_alive():
        atexit.register(_leave, loading, code)
    if abandoned:
        say("stopped before it was ready")
    elif dead is not None:
        say(f"stopped: {dead}")
    else:
        say("stopped" if ended else "stopped during a segment")
    return code


def _leave(loading: threading.Thread, code: int) -> None:
    """Ends the process at once with this exit code, if the loading thread still runs.
    It may be compiling a program, and XLA's cleanup would wait for that or crash."""
    if loading.is_alive():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
