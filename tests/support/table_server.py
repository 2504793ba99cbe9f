"""A server in this process whose greedy text is a table, and clients for it."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx2
import uvicorn

import stree_jax
from stree_jax.cli.served_template import speller
from stree_jax.server.app import make_app
from stree_jax.server.batch import Batch
from stree_jax.server.connection import Connection
from stree_jax.server.engine import Engine
from stree_jax.server.metrics import Metrics
from stree_jax.server.rows import Sizes
from stree_jax.server.service import Limits, Service, reader_of
from stree_jax.speculation.default_tree import spec_for
from tests.support import table_models

NAME = "table"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = "pqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpqpq"


def write_table(folder, template=CHATML):
    """Writes a llama for tests of the server.

    It continues x, and the beginning of an answer, with "xyz" up to its end of turn. p
    and q follow each other forever, and so do r and s. After s, the logit of z is 0.9
    times that of r.
    """
    tokenizer = table_models.byte_level()
    newline = "\u010a"  # as byte-level tokenizers write it
    chain = table_models.follow(tokenizer, [newline, *"xyz", "<|im_end|>"])
    p, q, r, s, z = (tokenizer.token_to_id(letter) for letter in "pqrsz")
    for token, other in ((p, q), (q, p), (r, s), (s, r)):
        chain[token] = other
    end = tokenizer.token_to_id("<|im_end|>")
    model = dict(tokenizer=tokenizer, chain=chain, config={"eos_token_id": end})
    also = [(s, z, 0.9)]
    path = table_models.write_llama(folder, len(chain), also=also, **model)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def spell_of(path):
    """Returns `Service.spell` for a model directory."""
    return speller(str(path), stree_jax.load(path))


def table_service(path, top=2, **changes):
    """Returns a service for a model directory, with up to `top` alternatives per token.
    Programs compile at first use."""
    model = stree_jax.load(path)
    sizes = Sizes(rows=2, context=64, steps=8, top_logprobs=top)
    batch = Batch(model, spec_for(model, None, None, None, None), sizes)
    engine = Engine(batch, 4)
    fields = dict(
        engine=engine,
        model=model,
        name=NAME,
        reader=reader_of(model),
        metrics=Metrics(engine),
        limits=Limits(body_bytes=65536, timeout_s=120.0),
        spell=spell_of(path),
    )
    return Service(**fields | changes)


@contextlib.contextmanager
def started(service):
    """Runs the service's engine and yields the service."""
    service.engine.batch.clear()
    service.engine.start()
    yield service
    assert service.engine.stop()


def ask(app, path, body=None, method=None, **options):
    """Sends one request to an application. Returns status, headers and JSON (or
    text)."""
    app = make_app(app) if isinstance(app, Service) else app

    async def asked():
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            verb = method or ("GET" if body is None else "POST")
            data = body if body is None or isinstance(body, str) else json.dumps(body)
            url = f"http://test{path}"
            return await http.request(verb, url, content=data, **options)

    answer = asyncio.run(asked())
    kind = answer.headers.get("content-type", "")
    found = answer.json() if kind.startswith("application/json") else answer.text
    return answer.status_code, answer.headers, found


@contextlib.contextmanager
def listening(app):
    """Serves an application on a real socket, and yields the port."""
    sock = socket.create_server(("127.0.0.1", 0))
    usual = dict(ws="none", log_config=None, lifespan="off", timeout_keep_alive=1)
    config = uvicorn.Config(app, http=Connection, **usual)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        sock.close()


def over_socket(port, data, seconds=30.0):
    """Sends bytes to a server. Returns its answer, up to the end of the connection."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), seconds) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                found += part
    return found
