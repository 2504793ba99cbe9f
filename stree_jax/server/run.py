"""The process around the application: its socket, its signals, its end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from stree_jax.server.engine import Engine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_S = 60.0  # that a segment may take to end


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Raises:
      ValueError: the address is in use, or none of this machine.
    """
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        problem = error.strerror or error
        raise ValueError(
            f"{host}:{port}: {problem}; give another --host or --port"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Ends in order on the first signal, and at once on the second."""

    def __init__(self, config: uvicorn.Config, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self.say = say

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._asked_to_end)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _asked_to_end(self) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        grace = self.config.timeout_graceful_shutdown
        self.say(f"stopping; what is running has {grace} s (again: at once)")


def run(
    app: Any,
    engine: Engine,
    sock: socket.socket,
    say: Callable[[str], None],
    grace_s: int,
) -> int:
    """Serve until a signal, or until the engine dies.

    Args:
      engine: warm, not started.
      grace_s: that texts have to end in, once the server is to stop.

    Returns:
      the exit code: 1 where the engine died.
    """
    config = uvicorn.Config(
        app,
        log_config=None,  # warnings and errors go where the process has them go
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config, say)

    def end(reason: str) -> None:
        server.should_exit = True

    engine.on_death = end
    engine.start()
    try:
        server.run(sockets=[sock])
    finally:
        ended = engine.stop(STOP_S)
    if engine.dead is not None:
        say(f"stopped: {engine.dead}")
        return 1
    say("stopped" if ended else "stopped in the midst of a segment")
    return 0
