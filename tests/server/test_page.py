"""Test what the server sends for the chat page; test_page_in_browser.py runs it."""

import base64
import hashlib
import re

import pytest

from stree_jax.cli.main import build_parser
from stree_jax.server.origins import with_origins
from stree_jax.server.page import page, with_page
from stree_jax.server.starting import UntilReady
from stree_jax.speculation.draft import ORIGINS
from tests.support.table_server import ask

HTML = page()[0].decode()
STARTING = UntilReady(wait_s=0)  # the server is not ready yet
BLOCKS = {
    kind: re.search(f"<{kind}>(.*?)</{kind}>", HTML, re.S)[1]
    for kind in ("script", "style")
}


def test_the_page_is_served_before_the_server_is_ready():
    app = with_page(STARTING)
    for method in ("GET", "HEAD"):
        status, headers, text = ask(app, "/", method=method)
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert int(headers["content-length"]) == len(HTML.encode())
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-cache"
        assert text == HTML or method == "HEAD"
    assert ask(app, "/", "{}", method="POST")[0] == 503  # of the application
    assert ask(app, "/index.html")[0] == ask(app, "/health")[0] == 503
    assert ask(STARTING, "/")[0] == 503, "without the page"


def test_the_policy_allows_the_own_script_and_style_only():
    policy = ask(with_page(STARTING), "/")[1]["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["trusted-types"] == "'none'"
    assert not re.search(r"unsafe|\*|https?:", policy)
    for kind, text in BLOCKS.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
        assert HTML.count(f"<{kind}") == 1


def test_the_page_asks_for_nothing_from_elsewhere():
    """Its paths are relative, so that it works below any path of a proxy."""
    urls = re.findall(r"[a-z]+://[^\s'\"]*", HTML)
    assert urls == ["http://www.w3.org/2000/svg"]  # the name of a format
    assert not re.search(r"""(src|href|action)=["'](?!data:)""", HTML)
    paths = re.findall(r"call\(\"([^\"]*)\"", BLOCKS["script"])
    assert set(paths) == {"health", "v1/models", "v1/chat/completions"}
    assert "@import" not in HTML and "url(" not in HTML


def test_the_page_inserts_text_only():
    wrong = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b"
    assert not re.search(wrong, HTML)
    assert not re.search(r"<[^>]*\s(on\w+|style)=", HTML), "the policy refuses these"
    assert "localStorage" not in HTML, "nothing outlives the tab"


def test_the_page_has_a_colour_for_every_origin():
    coloured = re.findall(r'\[data-origin="([^"]*)"\]', BLOCKS["style"])
    assert coloured == [name for name in ORIGINS if name != "target"]


def test_every_field_has_a_label():
    fields = re.findall(r"<(?:input|textarea)[^>]*", HTML)
    assert len(fields) >= 8
    for field in fields:
        before = HTML[: HTML.index(field)]
        inside = before.rfind("<label") > before.rfind("</label>")
        name = re.search('id="(.*?)"', field)[1]
        assert inside or f'for="{name}"' in before


OWN = [
    ("http://192.168.1.5:8000", "192.168.1.5:8000", True),
    ("https://192.168.1.5", "192.168.1.5", True),  # a proxy with TLS
    ("http://[fd00::1]:8000", "[fd00::1]:8000", True),
    ("http://localhost:8000", "localhost:8000", True),
    ("http://192.168.1.6:8000", "192.168.1.5:8000", False),  # another machine's page
    ("http://192.168.1.5:8001", "192.168.1.5:8000", False),
    ("http://example.com", "example.com", False),  # DNS may be rebound
    ("http://1.2.3.4.example.com", "1.2.3.4.example.com", False),
    ("null", "null", False),
]


@pytest.mark.parametrize("origin, host, allowed", OWN)
def test_the_own_page_may_use_the_server(origin, host, allowed):
    """At an IP address or localhost, also if other pages are listed or refused."""
    headers = {"Origin": origin, "Host": host}
    path, listed = "/v1/chat/completions", ("https://chat.example.com",)
    app = with_origins(STARTING, listed, has_page=True)
    assert ask(app, path, {}, headers=headers)[0] == (503 if allowed else 403)
    assert ask(with_origins(STARTING, listed), path, {}, headers=headers)[0] == 403


def test_the_option():
    parser = build_parser()
    assert not parser.parse_args(["serve"]).no_page
    assert parser.parse_args(["serve", "--no-page"]).no_page
