"""Test the chat page in headless Chromium (`make test-browser`), with servers of tiny
models and with a server that follows a script."""

import asyncio
import json
import time
from contextlib import contextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from stree_jax.server.app import make_app
from stree_jax.server.origins import with_origins
from stree_jax.server.page import with_page
from tests.server.tool_requests import NOW, PIECES, THOUGHTS, WEATHER
from tests.support.answer_server import answer_service, write_answer
from tests.support.browser import CHROMIUM, Browser
from tests.support.table_server import ask, listening, started

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
TIMES = dict(cache_n=3, prompt_n=4, prompt_ms=9.0, predicted_n=2)
TIMES |= dict(predicted_per_second=20.0, acceptance_length=2.0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@contextmanager
def opened(browser, app, has_keys=False):
    """Serves an application with the page, and opens it with an empty chat."""
    app = with_origins(with_page(app), has_keys=has_keys, has_page=True)
    with listening(app) as port:
        browser.look(900, 700)
        browser.requests.clear()
        browser.messages.clear()
        browser.open(
            f"http://127.0.0.1:{port}/"
        )  # a new port: nothing is stored for it
        yield port
        browser.run("running?.abort()")
        assert browser.messages == []
        assert all(
            url.startswith(f"http://127.0.0.1:{port}/") for url in browser.requests
        )
        browser.send("Page.navigate", url="about:blank")


class Scripted:
    """A server whose answers are given.

    Attributes:
      pieces: deltas of an answer: texts, or exceptions, at which the connection breaks.
      error: (status, message) to answer with instead, or None.
      gate: whether an answer waits after its first piece.
      bodies: the requests so far.
    """

    def __init__(self, *pieces):
        self.pieces, self.error, self.gate, self.bodies = pieces, None, False, []
        self.health, self.key, self.finish = 200, None, "stop"
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
            ]
        )

    async def _health(self, http):
        return JSONResponse({"status": "starting"}, self.health)

    def _refused(self, http):
        error = self.error
        if self.key and http.headers.get("authorization") != f"Bearer {self.key}":
            error = 401, "Incorrect API key provided."
        return error and JSONResponse({"error": {"message": error[1]}}, error[0])

    async def _models(self, http):
        model = {"id": "scripted", "max_model_len": 9}
        refused = self._refused(http) if self.key else None
        return refused or JSONResponse({"data": [model]})

    async def _answer(self, http):
        self.bodies.append(json.loads(await http.body()))
        return self._refused(http) or StreamingResponse(self._events())

    async def _events(self):
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, Exception):
                await asyncio.sleep(0.3)  # until the pieces before it have arrived
                raise piece
            if isinstance(piece, dict):
                yield f"data: {json.dumps(piece)}\n\n"
                continue
            choice = {"delta": {"content": piece}, "origins": [[piece, "lookup"]]}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            while self.gate and i == 0:
                await asyncio.sleep(0.02)
        last = {"delta": {}, "finish_reason": self.finish}
        yield f"data: {json.dumps({'choices': [last], 'timings': TIMES})}\n\n"
        yield "data: [DONE]\n\n"


def send(browser, text):
    browser.run("box.focus()")
    browser.type(text)
    browser.press("Enter")


def text_of(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)})?.textContent")


def done(browser):
    browser.until("!running && turns.length > 0")


def settle(browser, **settings):
    """Changes settings in the dialog."""
    browser.run("document.getElementById('open').click()")
    for name, value in settings.items():
        browser.run(f"$('{name}').value = {json.dumps(value)}")
    browser.run("document.getElementById('done').click()")


# --- with a model ---------------------------------------------------------------------


def test_a_chat_is_shown_with_its_origins(browser, service):
    body = dict(messages=[{"role": "user", "content": "abc"}], temperature=0)
    body |= dict(max_tokens=40, return_origins=True)
    with opened(browser, make_app(service)):
        browser.until("$('model').textContent.startsWith('tiny')")
        settle(browser, temperature="0", max_tokens="40")
        send(browser, "abc")
        done(browser)
        answer = ask(service, "/v1/chat/completions", body)[2]
        (choice,) = answer["choices"]
        shown = browser.run("turns[1].content")
        assert shown == choice["message"]["content"] == browser.run("turns[1].raw")
        assert text_of(browser, ".assistant .text") == shown
        spans = browser.run(
            "[...document.querySelectorAll('.assistant .text [data-origin]')]"
            ".map(span => [span.textContent, span.dataset.origin])"
        )
        assert "".join(text for text, _ in spans) == shown
        assert browser.run("tokensOf(turns[1])") == answer["usage"]["completion_tokens"]
        assert {origin for _, origin in spans} == set(browser.run("turns[1].counts"))
        figures = text_of(browser, ".assistant .figures")
        for word in ("target", "tokens/s", "tokens/pass", "cached"):
            assert word in figures
        before = browser.run("[log.textContent, turns.length]")
        browser.reload()
        assert browser.run("[log.textContent, turns.length]") == before
        browser.run("$('new').click()")
        assert browser.run("turns.length") == 0
        assert not text_of(browser, ".user")


def test_calls_are_shown_and_answered(browser, tmp_path):
    path = write_answer(tmp_path / "calls", PIECES)
    with started(answer_service(path)) as service:
        with opened(browser, make_app(service)):
            settle(browser, tools=json.dumps([WEATHER, NOW]), temperature="0")
            send(browser, "Rain?")
            done(browser)
            assert text_of(browser, ".assistant .text") == "I look."
            first = text_of(browser, ".call")
            assert first.startswith("get_weather") and '"city": "Zürich"' in first
            assert browser.run("box.placeholder") == "Result of get_weather"
            send(browser, "sunny")
            assert browser.run("box.placeholder") == "Result of now"
            send(browser, "noon")
            done(browser)
            roles = browser.run("turns.map(turn => turn.role)")
            assert roles == ["user", "assistant", "tool", "tool", "assistant"]


def test_reasoning_can_be_collapsed(browser, tmp_path):
    template_opens = [THOUGHTS[0], *THOUGHTS[1:]]
    path = write_answer(tmp_path / "thoughts", ["<think>", *template_opens], special=())
    with started(answer_service(path)) as service:
        with opened(browser, make_app(service)):
            settle(browser, temperature="0")
            send(browser, "Rain?")
            done(browser)
            assert text_of(browser, ".reasoning .text") == "Let me think."
            assert text_of(browser, ".assistant > .text") == "It rains."
            assert browser.run("document.querySelector('details').open") is False
            origins = (
                "[...document.querySelectorAll('.reasoning [data-origin=target]')]"
            )
            assert browser.run(f"{origins}.length") > 0


# --- with a script --------------------------------------------------------------------


def test_stop_and_regenerate(browser):
    server = Scripted("one ", "two")
    server.gate = True
    with opened(browser, server.app):
        send(browser, "x")
        browser.until("turns[1]?.content === 'one '")
        assert browser.run("$('stop').hidden") is False
        browser.press("Escape")
        done(browser)
        assert text_of(browser, ".assistant .note") == "Stopped."
        assert text_of(browser, ".assistant .text") == "one "
        server.gate = False
        browser.run("document.querySelector('.figures button').click()")
        browser.until("!running && turns[1]?.content === 'one two'")
        assert browser.run("turns.length") == 2
        assert len(server.bodies[1]["messages"]) == 1, "the old answer is not sent"
        server.error = 429, "The server is busy."
        browser.run("document.querySelector('.figures button').click()")
        browser.until("$('status').textContent === 'The server is busy.'")
        assert browser.run("turns[1].content") == "one two", "it comes back"


@pytest.mark.parametrize("status, message", [(503, "starting"), (400, "too long")])
def test_a_refused_message_goes_back_into_the_box(browser, status, message):
    server = Scripted("yes")
    server.error = status, message
    with opened(browser, server.app):
        send(browser, "again")
        browser.until(f"$('status').textContent === '{message}'")
        assert browser.run("box.value") == "again"
        assert browser.run("turns.length") == 0
        server.error = None
        browser.press("Enter")
        browser.until("turns[1]?.content === 'yes'")
        assert text_of(browser, "#status") == ""


def test_a_connection_that_breaks(browser):
    """The partial answer stays, with a note, and is part of the next request."""
    for end in (OSError("broken"), {"error": {"message": "decoding failed"}}):
        server = Scripted("half", end)
        with opened(browser, server.app):
            send(browser, "x")
            done(browser)
            note = "The connection was lost" if isinstance(end, OSError) else "decoding"
            assert text_of(browser, ".note.bad").startswith(note)
            assert text_of(browser, ".assistant .text") == "half"
            time.sleep(0.3)  # until the browser has closed the connection
            send(browser, "y")
            browser.until("!running && turns.length === 4")
            assert [m["content"] for m in server.bodies[1]["messages"]] == [
                "x",
                "half",
                "y",
            ]


def test_a_server_that_starts_or_is_gone(browser):
    server = Scripted("yes")
    server.health = 503
    with opened(browser, server.app):
        browser.until("$('status').textContent.startsWith('The server is starting')")
        server.health = 200
        browser.until("$('model').textContent.startsWith('scripted')")
        browser.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
        send(browser, "x")
        browser.until("$('status').textContent === 'The server cannot be reached.'")
        assert browser.run("box.value") == "x"


def test_an_api_key_is_asked_for(browser):
    server = Scripted("yes")
    server.key = "secret"
    with opened(browser, server.app, has_keys=True):
        browser.until("$('settings').open && document.activeElement.id === 'key'")
        assert "needs an API key" in text_of(browser, "#status")
        browser.type("wrong")
        browser.press("Enter")
        browser.until("$('status').textContent.includes('does not accept')")
        browser.run("$('key').select()")
        browser.type("secret")
        browser.press("Enter")
        browser.until("$('model').textContent.startsWith('scripted')")
        send(browser, "x")
        done(browser)
        assert browser.run("sessionStorage.getItem('stree-jax key')") == "secret"
        assert "secret" not in browser.run("sessionStorage.getItem('stree-jax')")
        assert browser.run("localStorage.length") == 0


def test_settings_are_sent(browser):
    server = Scripted("yes")
    with opened(browser, server.app):
        fields = dict(temperature="0.5", top_p="0.9", max_tokens="7", seed="3")
        settle(browser, system="Be kind.", **fields)
        send(browser, "x")
        done(browser)
        (body,) = server.bodies
        assert body["messages"][0] == {"role": "system", "content": "Be kind."}
        assert {name: body[name] for name in fields} == {
            name: float(value) for name, value in fields.items()
        }
        settle(browser, tools="[")
        send(browser, "y")
        browser.until("$('status').textContent.startsWith('Settings, tools: not JSON')")
        assert len(server.bodies) == 1
        browser.run("$('open').click(); $('temperature').value = '7'")
        browser.run("$('done').click()")
        assert browser.run("$('settings').open"), "7 is out of range"


def test_keys_of_the_keyboard(browser):
    server = Scripted("yes")
    with opened(browser, server.app):
        browser.run("box.focus()")
        browser.press("Enter")
        browser.type("  ")
        browser.press("Enter")
        assert browser.run("turns.length") == 0, "an empty message"
        browser.run("setBox('')")
        browser.type("one")
        browser.press("Enter", shift=True)
        browser.type("two")
        assert browser.run("box.value") == "one\ntwo"
        browser.press("Enter")
        done(browser)
        assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"


def test_a_full_context_is_said(browser):
    server = Scripted("yes")
    server.finish = "length"
    with opened(browser, server.app):
        browser.until("model")
        send(browser, "x")
        done(browser)
        assert text_of(browser, ".assistant .note").startswith("The context is full")
        assert "9 of 9 tokens" in text_of(browser, "#model")


def test_markup_is_text_and_code_is_a_block(browser):
    """However the stream is cut."""
    code = "See:\n\n```python\nif a < b:\n    <b>`x`</b>\n```\nThen <img src=x>.\n```\n"
    for size in (1, 2, 7, len(code)):
        pieces = [code[i : i + size] for i in range(0, len(code), size)]
        with opened(browser, Scripted(*pieces).app):
            send(browser, "<script>alert(1)</script>")
            done(browser)
            assert text_of(browser, ".user .text") == "<script>alert(1)</script>"
            assert text_of(browser, ".assistant pre") == "if a < b:\n    <b>`x`</b>\n"
            shown = text_of(browser, ".assistant > .text")
            assert shown == "See:\n\nif a < b:\n    <b>`x`</b>\nThen <img src=x>.\n"
            assert not browser.run("document.querySelector('article img, article b')")


def test_a_very_long_answer_stays_quick(browser):
    """20,000 pieces; the end stays in view until the reader scrolls away."""
    pieces = [f"word{i % 7} " + "\n" * (i % 50 == 0) for i in range(20_000)]
    with opened(browser, Scripted(*pieces).app):
        send(browser, "x")
        browser.until("!running && turns[1]?.times", 60)
        assert browser.run("turns[1].content.length") == sum(map(len, pieces))
        assert browser.run("atEnd()")


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_has_contrast(browser, phone, dark):
    with opened(browser, Scripted("word " * 80 + "x" * 400).app):
        browser.look(*((360, 640) if phone else (1200, 800)), dark=dark, phone=phone)
        send(browser, "y" * 300)
        done(browser)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("log.scrollWidth <= log.clientWidth")
        page, text, muted = browser.run(
            "[getComputedStyle(document.documentElement).backgroundColor,"
            " getComputedStyle(document.querySelector('.assistant .text')).color,"
            " getComputedStyle(document.querySelector('.figures')).color]"
        )
        assert contrast(page, text) > 10 and contrast(page, muted) > 4.5
        assert (luminance(page) < 0.1) is dark


def luminance(colour):
    """Returns the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(x) / 255 for x in colour[4:-1].split(",")]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
