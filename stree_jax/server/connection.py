"""HTTP connections whose clients have limited time to send the head of a request."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from stree_jax.server.errors import ApiError

HEAD_S = 20.0  # seconds for a request line and its headers


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with two changes: errors are in the API's format, and
    the connection is closed if a request's head does not arrive in time. uvicorn would
    wait for it without limit."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Starts the timer if it is not running, or stops it once a request's head has
        arrived."""
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        theirs = self.conn.their_state
        if theirs is not h11.IDLE and not (answered and theirs is h11.SEND_BODY):
            self._stop_watching()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._time_out)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _time_out(self) -> None:
        """Closes the connection, with an error if a part of a request has arrived."""
        self._late = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "The request's headers did not arrive in time."))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs no warning: the request is answered over HTTP/1.1, as clients expect."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, msg))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Sends an error response."""
        body = json.dumps(error.body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
