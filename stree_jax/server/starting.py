"""What a server answers before its model is loaded and its programs are compiled."""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stree_jax.server.errors import ApiError

# Seconds. Loading and compiling take 15 to 70, and official clients retry twice.
RETRY_S = 5
STARTING = {"status": "starting"}


class UntilReady:
    """An ASGI application that answers 503 with Retry-After until `app` is set.

    Attributes:
      app: answers requests from then on.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app or _answer(scope["path"])
        await app(scope, receive, send)


def _answer(path: str) -> ASGIApp:
    retry = {"Retry-After": str(RETRY_S)}
    error = ApiError(
        503,
        "The server is starting: it loads the model and compiles; please retry, or "
        "wait until GET /health answers 200.",
        code="starting",
    )
    body = STARTING if path == "/health" else error.body()
    return JSONResponse(body, error.status, retry)
