"""Answers requests before the model is loaded and programs are compiled."""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stree_jax.server.errors import ApiError

# Value of Retry-After, in seconds. Loading and compiling take 15 to 70 seconds, and
# OpenAI's clients retry twice.
RETRY_S = 5
STARTING = {"status": "starting"}


class UntilReady:
    """An ASGI application that answers 503 with Retry-After until `app` is set.

    Attributes:
      app: the application that answers requests once it is set.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app or _answer(scope["path"])
        await app(scope, receive, send)


def _answer(path: str) -> ASGIApp:
    """Returns the response to a request for a path."""
    retry = {"Retry-After": str(RETRY_S)}
    error = ApiError(
        503,
        "The server is starting (loading the model and compiling); please retry, or "
        "wait until GET /health answers 200.",
        code="starting",
    )
    body = STARTING if path == "/health" else error.body()
    return JSONResponse(body, error.status, retry)
