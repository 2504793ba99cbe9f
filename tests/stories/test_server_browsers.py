"""Test that local web pages can use the server and foreign pages cannot (CORS)."""

from dataclasses import replace

import pytest

from stree_jax.server.app import make_app
from stree_jax.server.errors import ApiError
from stree_jax.server.origins import origins_named, with_origins
from stree_jax.server.starting import UntilReady
from tests.support.table_server import ask, started, table_service, write_table

PAGE, STRANGER = "http://localhost:3000", "https://example.com"
ALLOW = "access-control-allow-origin"
GREEDY = dict(prompt="x", temperature=0)
ASKS = {  # headers of the official JavaScript client
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("browsers") / "model", template=None)
    with started(table_service(path)) as service:
        yield service


def preflight(app, origin):
    headers = ASKS | {"Origin": origin}
    return ask(app, "/v1/chat/completions", method="OPTIONS", headers=headers)


def from_page(app, origin, path="/v1/completions", body=GREEDY, **headers):
    return ask(app, path, body, headers={"Origin": origin} | headers)


@pytest.mark.parametrize(
    "origin",
    [
        PAGE,
        "https://localhost",
        "http://127.0.0.1:8080",
        "http://127.0.1.1",
        "http://[::1]:5173",
    ],
)
def test_local_pages_are_allowed(service, origin):
    app = with_origins(make_app(service))
    status, headers, _ = preflight(app, origin)
    assert status == 200 and headers[ALLOW] == origin
    assert "POST" in headers["access-control-allow-methods"]
    allowed = headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed and "x-stainless-os" in allowed
    status, headers, answer = from_page(app, origin)
    assert status == 200 and answer["choices"][0]["text"] == "yz"
    assert headers[ALLOW] == origin and "Origin" in headers["vary"]


@pytest.mark.parametrize(
    "origin",
    [
        STRANGER,
        "null",
        "http://localhost.example.com",
        # This name may resolve to the local machine
        "http://127.0.0.1.example.com:8000",
        "http://localhost:3000.example.com",
        "http://example.com/localhost",
        "file://",
    ],
)
def test_foreign_pages_are_refused(service, origin):
    app = with_origins(make_app(service))
    assert ALLOW not in preflight(app, origin)[1]
    before = service.engine.counts.tokens
    status, headers, answer = from_page(app, origin, **{"Content-Type": "text/plain"})
    assert status == 403 and ALLOW not in headers
    assert "--allow-origin" in answer["error"]["message"]
    assert service.engine.counts.tokens == before  # nothing was generated


def test_origins_can_be_allowed_by_name(service):
    assert origins_named(None) is None and origins_named(["none"]) == ()
    named = origins_named(["https://Example.com/", "null"])
    app = with_origins(make_app(service), named)
    assert from_page(app, STRANGER)[1][ALLOW] == STRANGER
    assert from_page(app, "null")[0] == 200
    assert from_page(app, PAGE)[0] == 403
    anyone = with_origins(make_app(service), origins_named(["*"]))
    assert preflight(anyone, STRANGER)[1][ALLOW] == "*"
    assert from_page(anyone, STRANGER)[1][ALLOW] == "*"
    nobody = with_origins(make_app(service), ())
    assert from_page(nobody, PAGE)[0] == 403
    # Not a browser: the request has no Origin
    assert ask(nobody, "/v1/completions", GREEDY)[0] == 200
    for wrong in (["localhost:3000"], ["http://a/b"], [""], ["none", "*"]):
        with pytest.raises(ValueError, match="--allow-origin"):
            origins_named(wrong)


def test_preflight_requests_need_no_api_key(service):
    app = with_origins(make_app(replace(service, keys=(b"k",))), has_keys=True)
    assert preflight(app, PAGE)[0] == 200
    status, headers, _ = from_page(app, PAGE)
    assert status == 401 and headers[ALLOW] == PAGE
    key = {"Authorization": "Bearer k"}
    assert from_page(app, PAGE, **key)[0] == 200
    # With an API key, foreign origins get an answer, but the browser hides it from the
    # page.
    status, headers, _ = from_page(app, STRANGER, **key)
    assert status == 200 and ALLOW not in headers


def test_streams_and_errors_have_cors_headers(service, monkeypatch):
    app = with_origins(make_app(service))
    status, headers, text = from_page(app, PAGE, body=GREEDY | dict(stream=True))
    assert status == 200 and "[DONE]" in text and headers[ALLOW] == PAGE
    wrong = [
        (404, "/v1/other", GREEDY),
        (400, "/v1/completions", GREEDY | dict(n=0)),
        (413, "/v1/completions", "x" * 70000),
        (404, "/v1/completions", GREEDY | dict(model="other")),
        (400, "/v1/completions", "{"),
    ]
    for status, path, body in wrong:
        found, headers, _ = from_page(app, PAGE, path, body)
        assert (found, headers[ALLOW]) == (status, PAGE)
    monkeypatch.setattr(service.engine, "max_waiting", 1)
    monkeypatch.setattr(service.engine, "submit", _full)
    status, headers, _ = from_page(app, PAGE)
    assert (status, headers[ALLOW], headers["retry-after"]) == (429, PAGE, "1")
    assert "Retry-After" in headers["access-control-expose-headers"]
    monkeypatch.setattr(service.engine, "submit", _broken)
    status, headers, _ = from_page(app, PAGE)
    assert (status, headers[ALLOW]) == (500, PAGE)
    status, headers, _ = from_page(with_origins(UntilReady(wait_s=0)), PAGE)
    assert (status, headers[ALLOW]) == (503, PAGE)


def _full(jobs):
    raise ApiError(429, "busy", headers={"Retry-After": "1"})


def _broken(jobs):
    raise RuntimeError("a mistake")


def test_options_lists_the_methods(service):
    status, headers, _ = ask(make_app(service), "/v1/completions", method="OPTIONS")
    assert status == 204 and "POST" in headers["allow"]
