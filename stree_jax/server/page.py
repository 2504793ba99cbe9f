"""Serves the page at `/`, a chat in the browser: the file page.html, without anything
from elsewhere."""

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib.resources import files

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.S)


def with_page(app: ASGIApp) -> ASGIApp:
    """Returns `app` with the page at `/`, also before the server is ready."""

    async def paged(scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/"
        if asked and scope["method"] in ("GET", "HEAD"):
            html, policy = page()
            response = Response(html, headers=headers_of(policy), media_type=HTML)
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return paged


HTML = "text/html"


@cache
def page() -> tuple[bytes, str]:
    """Returns the page, and its Content-Security-Policy.

    The policy allows only the page's own script and style, by their hashes, and
    requests to this server. Scripts cannot write HTML (Trusted Types).
    """
    html = files("stree_jax.server").joinpath("page.html").read_text("utf-8")
    found = {kind: _hash(text) for kind, text in _INLINE.findall(html)}
    policy = {
        "default-src": "'none'",
        "script-src": found["script"],
        "style-src": found["style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return html.encode(), "; ".join(" ".join(item) for item in policy.items())


def headers_of(policy: str) -> dict[str, str]:
    """Returns the headers of the page."""
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    """Returns the source expression of an inline script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"
