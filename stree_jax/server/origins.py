"""Which web pages may use a server: CORS, and a guard where no API key is wanted.

A browser sends the Origin header for a page's requests. Pages of this machine are
allowed by default. A page of a stranger must not use a server that listens on the
loopback address and wants no key: the browser would carry its requests past any
firewall. CORS alone hides only the answer from such a page, so its POSTs are refused.
The same check stops DNS rebinding, where a stranger's name leads to this address: the
Origin header still holds that name.
"""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stree_jax.server.errors import ApiError

ANY, NO_PAGE = "*", "none"
LOCAL = r"https?://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+")
MAX_AGE_S = 600  # that a browser keeps the answer to a preflight


def origins_named(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the origins of --allow-origin, or None for pages of this machine.

    Raises:
      ValueError: a value that no browser sends as an origin.
    """
    if not values:
        return None
    found = tuple(value.strip().rstrip("/").lower() for value in values)
    if NO_PAGE in found:
        if len(found) > 1:
            raise ValueError(f"--allow-origin: {NO_PAGE} stands alone")
        return ()
    for origin in found:
        if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
            raise ValueError(
                "--allow-origin: want an origin such as http://localhost:3000 (scheme, "
                f"host and port, no path), {ANY} or {NO_PAGE}, got {origin!r}"
            )
    return found


def with_origins(
    app: ASGIApp, origins: Sequence[str] | None = None, *, has_keys: bool = False
) -> ASGIApp:
    """Returns `app` with CORS headers on all its answers, and its preflights answered.

    Args:
      origins: the allowed ones, "*" for any. If None, pages of this machine.
      has_keys: whether requests need a key, so that pages of others do no harm.
    """
    local = LOCAL if origins is None else None
    guarded = _Guard(app)
    found = CORSMiddleware(
        app if has_keys else guarded,
        allow_origins=origins or (),
        allow_origin_regex=local,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # clients send x-stainless-* and others beside the key
        expose_headers=("Retry-After",),
        allow_private_network=True,  # of allowed origins only
        max_age=MAX_AGE_S,
    )
    guarded.allowed = found.is_allowed_origin
    return found


class _Guard:
    """An application whose POSTs are refused to pages of other origins."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.allowed = lambda origin: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http" and scope["method"] == "POST":
            origin = Headers(scope=scope).get("origin")
            if origin is not None and not self.allowed(origin):
                app = _forbidden(origin)
        await app(scope, receive, send)


def _forbidden(origin: str) -> ASGIApp:
    error = ApiError(
        403,
        f"Pages of {origin} may not use this server; start it with --allow-origin "
        f"{origin}, or with an API key.",
        code="origin_not_allowed",
    )
    return JSONResponse(error.body(), error.status)
