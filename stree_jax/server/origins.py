"""Controls which web pages may use a server: CORS, and a guard for servers without API
keys.

A browser sends the Origin header with a page's requests. Pages of this machine are
allowed by default. A page from elsewhere must not use a server that listens on the
loopback address without API keys: the browser would carry its requests past any
firewall. CORS hides only the answers from such a page, so its POST requests are
rejected. The same check stops DNS rebinding, where an attacker's host name resolves to
this address, because the Origin header still contains that name.

The server's own page may use it at localhost or at an IP address, which no other page
can have. At other host names it may not, because these can be rebound.
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
# Hosts that DNS cannot rebind: an attacker's page is never at them.
FIXED = re.compile(r"(localhost|[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\])(:[0-9]+)?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+")
MAX_AGE_S = 600  # seconds for which a browser caches the answer to a preflight


def origins_named(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the origins of --allow-origin, or None for pages of this machine.

    Raises:
      ValueError: a value is not a valid origin.
    """
    if not values:
        return None
    found = tuple(value.strip().rstrip("/").lower() for value in values)
    if NO_PAGE in found:
        if len(found) > 1:
            raise ValueError(f"--allow-origin: {NO_PAGE} must be the only value")
        return ()
    for origin in found:
        if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
            raise ValueError(
                "--allow-origin: want an origin such as http://localhost:3000 (scheme, "
                f"host and port, no path), {ANY} or {NO_PAGE}, got {origin!r}"
            )
    return found


def with_origins(
    app: ASGIApp,
    origins: Sequence[str] | None = None,
    *,
    has_keys: bool = False,
    has_page: bool = False,
) -> ASGIApp:
    """Returns `app` with CORS headers on all answers, and answers to preflights.

    Args:
      app: the application.
      origins: the allowed origins, "*" for all. If None, pages of this machine.
      has_keys: True if requests need an API key, so that other pages cannot use the
        server anyway.
      has_page: True if the server has a page of its own, which may then use it.
    """
    local = LOCAL if origins is None else None
    guarded = _Guard(app, has_page)
    found = CORSMiddleware(
        app if has_keys else guarded,
        allow_origins=origins or (),
        allow_origin_regex=local,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # clients send headers such as x-stainless-*
        expose_headers=("Retry-After",),
        allow_private_network=True,  # for allowed origins only
        max_age=MAX_AGE_S,
    )
    guarded.allowed = found.is_allowed_origin
    return found


class _Guard:
    """An application that rejects POST requests from pages of other origins."""

    def __init__(self, app: ASGIApp, has_page: bool) -> None:
        self.app, self.has_page = app, has_page
        self.allowed = lambda origin: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            own = self.has_page and is_own(origin or "", headers.get("host", ""))
            if origin is not None and not own and not self.allowed(origin):
                app = _forbidden(origin)
        await app(scope, receive, send)


def is_own(origin: str, host: str) -> bool:
    """True if an Origin header names this server, at a host that DNS cannot rebind.

    Args:
      origin: value of the Origin header.
      host: value of the Host header.
    """
    place = origin.lower().partition("://")[2]
    return place == host.lower() and FIXED.fullmatch(place) is not None


def _forbidden(origin: str) -> ASGIApp:
    """Returns the response to a page of another origin."""
    error = ApiError(
        403,
        f"Pages of {origin} may not use this server; start it with --allow-origin "
        f"{origin}, or with an API key.",
        code="origin_not_allowed",
    )
    return JSONResponse(error.body(), error.status)
