"""Test a server that gets requests while it loads and compiles."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx2
import pytest

from stree_jax.server import run
from stree_jax.server.starting import UntilReady
from tests.support.server_process import ROOT, Process
from tests.support.table_server import write_table

TINY = ["--drafter", "none", "--rows", "1", "--context", "32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_table(tmp_path_factory.mktemp("start") / "model"))


def is_closed(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_503_while_starting_and_a_signal_stops_it(model, number):
    """Before a fix, these connections were refused. The signal arrives during
    compilation."""
    server = Process("--model", model, *TINY, ready=False)
    try:
        for path, starting in [
            ("/v1/completions", "code"),
            ("/v1/models", "code"),
            ("/health", "status"),
        ]:
            answer = httpx2.get(server.root_url + path)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            body = answer.json()
            assert body.get("error", body)[starting] == "starting"
        server.process.send_signal(number)
        assert server.ended() == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert is_closed(server.port)
    assert "Traceback" not in "".join(server.lines)
    assert server.lines[-1] == "stree-jax: stopped before it was ready\n"


class Engine:
    """A stand-in for an engine that generates nothing."""

    dead = None

    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self, seconds):
        self.calls.append("stop")
        return True


async def fine(scope, receive, send):
    start = {"type": "http.response.start", "status": 200, "headers": []}
    await send(start)
    await send({"type": "http.response.body", "body": b"fine"})


def served(load, client, front=None):
    """Runs a server in this thread, and `client(url)` in another.

    Returns:
      The exit code and the printed lines.
    """
    said = []
    sock = run.bound_socket("127.0.0.1", 0)
    url = run.url_of(sock).removesuffix("/v1")

    def asks():
        while not said:
            time.sleep(0.01)
        client(url)

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        return run.run(load, sock, said.append, 5, front=front), said
    finally:
        thread.join()
        assert is_closed(int(url.rpartition(":")[2]))


def posted(url):
    return httpx2.post(url + "/v1/completions", json={}, timeout=60)


def test_starting_then_ready_then_stopped():
    """Requests for text wait during the start. Others say that the server starts."""
    loaded, engine, seen = threading.Event(), Engine(), []

    def load(say):
        say("compiling")
        assert loaded.wait(30)
        return run.Ready(fine, engine, "ready in 1 s")

    def client(url):
        seen.append(httpx2.get(url + "/health").json())
        with ThreadPoolExecutor() as pool:
            held = [pool.submit(posted, url) for _ in range(3)]
            while front.waiting < 3:
                time.sleep(0.01)
            assert httpx2.get(url + "/v1/models").status_code == 503
            assert not any(answer.done() for answer in held)
            loaded.set()
            seen.extend(answer.result().text for answer in held)
        while httpx2.get(url + "/health").status_code != 200:
            time.sleep(0.01)
        seen.append(httpx2.get(url + "/v1/models").text)
        os.kill(os.getpid(), signal.SIGTERM)

    code, said = served(load, client, front := UntilReady())
    assert code == 0 and engine.calls == ["start", "stop"]
    assert seen == [{"status": "starting"}, *["fine"] * 4]
    assert said[0].startswith("listening on http://127.0.0.1:")
    assert said[1:3] == ["compiling", "ready in 1 s"] and said[-1] == "stopped"


@pytest.mark.parametrize(
    "limits", [dict(wait_s=0.05), dict(most=0)], ids=["too long", "too many"]
)
def test_requests_that_cannot_wait_get_503(limits):
    go, seen = threading.Event(), []

    def load(say):
        assert go.wait(30)
        return run.Ready(fine, Engine(), "ready")

    def client(url):
        seen.append(posted(url))
        os.kill(os.getpid(), signal.SIGTERM)

    served(load, client, UntilReady(**limits))
    go.set()
    (answer,) = seen
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "starting"


def test_waiting_requests_are_answered_when_the_server_stops():
    """At a signal, or if loading fails. The command then prints one line, and exits
    with code 2."""
    fails, answers = threading.Event(), []

    def load(say):
        assert fails.wait(30)
        raise ValueError("the weights are damaged")

    def client(url, ends):
        with ThreadPoolExecutor() as pool:
            held = pool.submit(posted, url)
            while not front.waiting:
                time.sleep(0.01)
            ends()
            answers.append(held.result())

    front = UntilReady()
    signalled = partial(client, ends=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert served(load, signalled, front)[0] == 0
    front = UntilReady()
    with pytest.raises(ValueError, match="damaged"):
        served(load, partial(client, ends=fails.set), front)
    for answer in answers:
        assert answer.status_code == 503 and "retry-after" not in answer.headers
        assert answer.json()["error"]["code"] == "unavailable"


def test_programs_are_compiled_after_the_server_is_ready():
    """A failure does not matter, and a signal ends it."""
    calls, stopping = [], threading.Event()

    def fails():
        calls.append("fails")
        raise RuntimeError("no memory")

    def last():
        calls.append("last")
        assert stopping.wait(30)

    def load(say):
        never = partial(calls.append, "never")
        return run.Ready(fine, Engine(), "ready", [fails, last, never])

    def client(url):
        while "last" not in calls:
            time.sleep(0.01)
        assert posted(url).text == "fine"
        os.kill(os.getpid(), signal.SIGTERM)

    code, said = served(load, client)
    stopping.set()
    for thread in threading.enumerate():
        if thread.name == "loading":
            thread.join(30)
    assert code == 0 and said[-1] == "stopped" and calls == ["fails", "last"]


def test_a_client_without_retries_gets_its_text(model):
    """A process that starts, and the official client."""
    server = Process("--model", model, *TINY, ready=False)
    try:
        assert httpx2.get(server.root_url + "/health").status_code == 503
        create = server.client().completions.create  # max_retries=0
        answer = create(model=model, prompt="ab", max_tokens=3)
        assert answer.usage.completion_tokens == 3
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_a_signal_during_the_start_stops_loading():
    go, engine, ended = threading.Event(), Engine(), threading.Event()

    def load(say):
        try:
            assert go.wait(30)
            say("compiling the next program")
            return run.Ready(fine, engine, "ready")
        finally:
            ended.set()

    code, said = served(load, lambda url: os.kill(os.getpid(), signal.SIGINT))
    go.set()
    assert code == 0 and said[-1] == "stopped before it was ready"
    assert ended.wait(30) and engine.calls == []
    assert "compiling the next program" not in said


def test_bad_options_are_refused_before_it_listens(model, tmp_path):
    """With one line and exit code 2."""
    taken = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "none").mkdir()
    (tmp_path / "bad.jinja").write_text("{% if %}")
    template = ["--model", model, "--chat-template"]
    for options, word in [
        (["--model", str(tmp_path / "missing")], "no such directory"),
        (["--model", str(tmp_path / "none")], "config.json"),
        ([*template, str(tmp_path / "x.jinja")], "x.jinja"),
        ([*template, str(tmp_path / "bad.jinja")], "bad.jinja: chat template, line 1"),
        ([*template, "/dev/zero"], "--chat-template: /dev/zero: not a regular file"),
        (["--api-key-file", "/dev/zero"], "--api-key-file: /dev/zero: not a regular"),
        (["--model", model, "--memory", "1MB"], "weights alone"),
        (["--model", model, "--logprobs", "9999"], "--logprobs"),
        (["--port", str(taken.getsockname()[1])], "Address already in use"),
        (["--port", "70000"], "--port"),
        (["--start-timeout", "-1"], "--start-timeout: want 0 seconds or more"),
        (["--start-timeout", "nan"], "--start-timeout: want 0 seconds or more"),
        (["--host", "nowhere.invalid"], "nowhere.invalid"),
        (["--host", "a" * 300], "use another --host"),
        (["--allow-origin", "localhost"], "--allow-origin"),
    ]:
        code, said = in_process(["serve", "--port", "0", *options])
        assert code == 2 and said.count("\n") == 1, said
        assert word in said and "listening" not in said
    taken.close()


def in_process(argv):
    import contextlib
    import io

    from stree_jax.cli.main import main

    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(argv), said.getvalue()


def test_urls_of_addresses():
    for host, shown in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")]:
        name = host, 8000, 0, 0
        sock = SimpleNamespace(getsockname=lambda name=name: name)
        assert run.url_of(sock) == f"http://{shown}:8000/v1"


def test_the_server_survives_a_closed_log(model):
    """As in `stree-jax serve 2>&1 | head -1`."""
    command = [sys.executable, "-m", "stree_jax", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--model", model, *TINY],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stderr.readline()
        process.stderr.close()
        url = line.split("listening on ")[1].split("/v1")[0]
        for _ in range(3):
            time.sleep(0.3)
            assert httpx2.get(url + "/health").status_code in (200, 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
