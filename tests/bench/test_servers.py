"""Test `bench servers`, with servers made here and with our own."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bench import servers
from bench.command import measure
from bench.registry import parse_bench
from stree_jax.cli import main as cli


@pytest.fixture
def answering():
    """Returns a function that starts a server which sends the same answer to every
    request, and returns its port."""
    started = []

    def start(status, text):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server.server_port

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_an_answer_is_read_from_its_stream(answering):
    events = [
        '{"choices": [{"text": ""}]}',
        '{"choices": [{"text": "a b"}]}',
        '{"choices": [{"text": " c"}]}',
        '{"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9, '
        '"prompt_tokens_details": {"cached_tokens": 4}}}',
    ]
    port = answering(200, "".join(f"data: {x}\n\n" for x in events) + "data: [DONE]\n")
    found = servers.ask(port, "x", 3)
    assert (found.text, found.tokens) == ("a b c", 3)
    assert (found.prompt, found.cached) == (9, 4)
    assert 0 < found.first <= found.seconds


@pytest.mark.parametrize(
    "status, text, message",
    [
        (400, "no such field", "400: no such field"),
        (200, 'data: {"error": "too long"}\n\n', "too long"),
        (200, 'data: {"choices": [{"text": "a"}]}\n\n', "no usage"),
    ],
)
def test_refusals_are_named(answering, status, text, message):
    port = answering(status, text)
    with pytest.raises(RuntimeError, match=message):
        servers.ask(port, "x", 3)
    with pytest.raises(RuntimeError, match=message):
        servers._crowd(port, ["x", "y", "z"], 3, 2)


def test_a_program_that_is_no_server_is_named(capsys):
    words = ["--llama-server", "/bin/false", "--histories", "1", "--clients"]
    assert cli.main(["bench", "servers", "--model", "demo", *words]) != 0
    assert "false" in capsys.readouterr().err


def test_our_server_is_measured():
    sizes = "--histories 3 --history 160 --clients 2 --count 2 --schemas 1"
    words = ["servers", "--model", "demo", *sizes.split(), "--max-new-tokens", "4"]
    report = measure(parse_bench(words))
    rows = report["units"]["histories"]["rows"]
    assert len(rows) == 3 and all(row[servers.OURS]["tokens"] == 16 for row in rows)
    assert all(0 < row[servers.OURS]["first"] for row in rows)
    assert report["units"]["2 clients"][servers.OURS]["tokens"] == 8
    first, again = report["units"]["schemas"]["rows"]
    assert first[servers.OURS]["text"] == again[servers.OURS]["text"]
    text = servers.table(report)
    assert text.count("\n\n") == 2 and text.count(servers.OURS) >= 4
