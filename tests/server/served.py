"""A server of a tiny model in this process, and clients for it."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
from openai import AsyncOpenAI

from stree_jax.server import programs
from stree_jax.server.app import make_app
from stree_jax.server.batch import Batch
from stree_jax.server.engine import Engine
from stree_jax.server.metrics import Metrics
from stree_jax.server.rows import Sizes
from stree_jax.server.service import Limits, Service, reader_of
from stree_jax.speculation.default_tree import spec_for
from tests.support.pieces import piece_tokenizer
from tests.support.tiny import tiny

SIZES = Sizes(rows=3, context=128, steps=3, top_logprobs=3)
QUEUE = 9
NAME = "tiny"
LENGTHS = [5, 1, 70, 33, 12, 100, 3]
NEW = [40, 17, 58, 30, 9, 28, 64]
FINE = dict(model="tiny", prompt="abc", max_tokens=4, temperature=0)


def tiny_model():
    model = tiny(1, layers=("mamba", "attention", "mlp"))
    config = replace(model.config, stop_tokens=(29, 42))
    return replace(model, tokenizer=piece_tokenizer(), config=config)


def spell(model):
    """Returns a stand-in for a chat template, with letters that the tokenizer has."""

    def spelled(messages, turn):
        text = "".join(f"{m['role'][0]}. {m['content']}\n" for m in messages)
        return model.tokenizer.encode(text + "a.").ids

    return spelled


def warm_batch(model):
    said = []
    batch = Batch(model, spec_for(model, "lookup", "auto:1,4", None, None), SIZES)
    programs.warm(batch, said.append)
    assert said and all(line.startswith("compiling") for line in said)
    return batch


def service_of(batch, **changes):
    """Returns a running service over a batch whose programs are compiled."""
    engine = Engine(batch, QUEUE)
    fields = dict(
        engine=engine,
        model=batch.model,
        name=NAME,
        reader=reader_of(batch.model),
        metrics=Metrics(engine),
        limits=Limits(body_bytes=4096, timeout_s=120.0),
        spell=spell(batch.model),
    )
    engine.start()
    return Service(**fields | changes)


@asynccontextmanager
async def client_of(service, key="nobody's"):
    """Yields the official client, connected directly to the application."""
    transport = httpx2.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield AsyncOpenAI(
            base_url="http://test/v1", api_key=key, http_client=http, max_retries=0
        )


def ask(service, path, body=None, **options):
    """Sends one request. Returns status, headers and JSON (or text)."""

    async def asked():
        transport = httpx2.ASGITransport(make_app(service))
        async with httpx2.AsyncClient(transport=transport) as http:
            method = "GET" if body is None else "POST"
            data = json.dumps(body) if isinstance(body, dict) else body
            url = f"http://test{path}"
            return await http.request(method, url, content=data, **options)

    response = asyncio.run(asked())
    try:
        return response.status_code, response.headers, response.json()
    except ValueError:
        return response.status_code, response.headers, response.text


class Connection:
    """A handmade ASGI connection whose client can disconnect."""

    def __init__(self, service, path, body):
        self.app, self.sent = make_app(service), []
        self.events = asyncio.Queue()
        data = json.dumps(body).encode()
        self.events.put_nowait({"type": "http.request", "body": data})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }

    async def send(self, message):
        self.sent.append(message)

    def run(self):
        return asyncio.ensure_future(self.app(self.scope, self.events.get, self.send))

    def leave(self):
        self.events.put_nowait({"type": "http.disconnect"})


class Paused:
    """Stops the engine before its next segment, whichever rows are in use."""

    def __init__(self, service):
        self.batch, self.reached = service.engine.batch, False
        self._open, self._advance = threading.Event(), self.batch.advance
        self.batch.advance = self._gated

    def _gated(self):
        self.reached = True
        self._open.wait(60)
        return self._advance()

    def resume(self):
        self._open.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.resume()
        del self.batch.advance


async def until(what):
    for _ in range(3000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")
