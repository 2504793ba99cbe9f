"""Test the server process with the official client: texts, disconnections, shutdown."""

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import stree_jax
from stree_jax import Sampling
from tests.support.server_process import ROOT, Process

CONTEXT = 192
PROMPTS = ["def add(a, b):\n", "import os\n\n\ndef size(path):\n", "class Row:\n"]


@pytest.fixture(scope="module")
def served():
    small = ["--drafter", "lookup", "--tree", "auto:1,4", "--rows", "2"]
    sizes = ["--context", str(CONTEXT), "--logprobs", "1", "--grace", "20"]
    server = Process(*small, *sizes)
    yield server
    server.process.kill()
    server.ended()


def settings(i):
    """Returns settings of request i. Neighbouring requests differ."""
    prompt, new = PROMPTS[i % len(PROMPTS)], 5 + 7 * (i % 6)
    drawn = None if i % 3 else Sampling(0.9, top_p=0.95, seed=i)
    return prompt, new, drawn, bool(i % 2)


def asked(client, i):
    prompt, new, drawn, stream = settings(i)
    options = (
        dict(temperature=0)
        if drawn is None
        else dict(temperature=drawn.temperature, top_p=drawn.top_p, seed=drawn.seed)
    )
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=new, stream=stream, **options
    )
    if stream:
        return "".join(chunk.choices[0].text for chunk in answer)
    return answer.choices[0].text


def test_parallel_clients_get_the_texts_of_generate(served):
    client, target = served.client(), stree_jax.load("demo", dtype="float32")
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda i: asked(client, i), range(18)))
    wanted = {}
    for i, text in enumerate(texts):
        prompt, new, drawn, _ = settings(i)
        if drawn is None and prompt not in wanted:
            most = dict(max_new_tokens=40, capacity=256)
            (wanted[prompt],) = stree_jax.generate(
                target, prompt, **most, drafter=None
            ).tokens
        if drawn is None:
            assert text == target.tokenizer.decode(wanted[prompt][:new]), i
    for i in (0, 3):
        prompt, new, drawn, _ = settings(i)
        most = dict(max_new_tokens=new, capacity=256, sampling=drawn)
        assert (
            texts[i]
            == stree_jax.generate(target, prompt, **most, drafter=None).texts[0]
        )


def test_a_client_that_stops_reading_frees_its_row(served):
    client = served.client()
    long = dict(model="demo", prompt=PROMPTS[0], max_tokens=CONTEXT - 16, temperature=1)
    for _ in range(6):  # three times the number of rows
        stream = client.completions.create(stream=True, seed=5, **long)
        next(iter(stream))
        stream.close()
    assert asked(client, 1)
    for refused, wrong in (
        (openai.AuthenticationError, dict(client=served.client("another"))),
        (openai.NotFoundError, dict(model="other")),
        (openai.BadRequestError, dict(prompt=["x" * 9 * CONTEXT])),
        (openai.BadRequestError, dict(frequency_penalty=3)),
    ):
        with pytest.raises(refused):
            wrong.pop("client", client).completions.create(**long | wrong)
    assert [model.id for model in client.models.list()] == ["demo"]


def test_the_bundled_model_chats(served):
    """Its template puts each message on lines of its own."""
    messages = [{"role": "system", "content": "import os"}]
    messages += [{"role": "user", "content": "def f(x):"}]
    chunks = served.client().chat.completions.create(
        model="demo", messages=messages, stream=True, max_tokens=12, temperature=0
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    target = stree_jax.load("demo", dtype="float32")
    options = dict(max_new_tokens=12, drafter=None)
    wanted = stree_jax.generate(target, "import os\ndef f(x):\n", **options)
    assert text == wanted.texts[0]


def test_a_port_in_use_is_one_line(served):
    command = ["serve", "--port", str(served.port)]
    found = subprocess.run(
        [sys.executable, "-m", "stree_jax", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert "Address already in use" in found.stderr


def test_a_signal_lets_answers_finish(served):
    """Must be the last test of this process."""
    client = served.client()
    long = dict(model="demo", prompt=PROMPTS[1], max_tokens=CONTEXT - 32, temperature=1)
    stream = client.completions.create(stream=True, seed=7, **long)
    parts = [next(iter(stream))]
    served.process.send_signal(signal.SIGTERM)
    parts += list(stream)
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    assert served.ended() == 0
    said = "".join(served.lines)
    assert "Traceback" not in said and said.endswith("stree-jax: stopped\n")
    with pytest.raises(ConnectionRefusedError), socket.socket() as sock:
        sock.connect(("127.0.0.1", served.port))
