"""Holds requests for text until the model is loaded and programs are compiled."""

import asyncio
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stree_jax.server.errors import ApiError

RETRY_S = 5  # value of Retry-After, in seconds
STARTING = {"status": "starting"}


class UntilReady:
    """An ASGI application that passes requests on to another one, once that is ready.

    Until then POST requests wait for it, because OpenAI's clients give up after two
    retries within seconds. Other requests get 503 at once, so that /health and
    /v1/models say that the server is starting.
    """

    def __init__(self, wait_s: float = 60.0, most: int = 64) -> None:
        """Makes an application that is not ready.

        Args:
          wait_s: maximum seconds that a request waits. It then gets 503 with
            Retry-After.
          most: maximum number of waiting requests. Further ones get 503 at once.
        """
        self.wait_s, self.most, self.waiting = wait_s, most, 0
        # Holds the application, or None if the server stops before it is ready.
        self._app: Future[ASGIApp | None] = Future()

    def open(self, app: ASGIApp) -> None:
        """Passes all requests on to `app`, waiting ones first. May be called from any
        thread."""
        self._settle(app)

    def close(self) -> None:
        """Answers all requests with 503, because the server stops, unless it is ready
        already. May be called from any thread."""
        self._settle(None)

    def _settle(self, app: ASGIApp | None) -> None:
        with suppress(InvalidStateError):  # the first call decides
            self._app.set_result(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and not self._app.done():
            await self._wait()
        app = self._app.result() if self._app.done() else None
        await (app or self._answer(scope["path"]))(scope, receive, send)

    async def _wait(self) -> None:
        """Waits until the server is ready or stops, at most `wait_s` seconds."""
        if self.waiting >= self.most:
            return
        self.waiting += 1
        try:
            await asyncio.wait([asyncio.wrap_future(self._app)], timeout=self.wait_s)
        finally:
            self.waiting -= 1

    def _answer(self, path: str) -> ASGIApp:
        """Returns the response to a request for a path."""
        if self._app.done():
            error = ApiError(503, "The server is stopping.", code="unavailable")
            return JSONResponse(error.body(), error.status)
        error = ApiError(
            503,
            "The server is starting (loading the model and compiling); please retry, "
            "or wait until GET /health answers 200.",
            code="starting",
        )
        body = STARTING if path == "/health" else error.body()
        return JSONResponse(body, error.status, {"Retry-After": str(RETRY_S)})
