"""Test a server that is full, slow or failing, or whose clients leave: nobody waits
forever.
"""

import asyncio
from dataclasses import replace

import openai
import pytest

from stree_jax.server import run
from stree_jax.server.app import make_app
from stree_jax.server.engine import MAX_FAILURES, Closed, Engine, Failed, Job
from stree_jax.server.rows import TextRequest, reading_widths
from stree_jax.server.service import Limits
from stree_jax.server.texts import Writer
from tests.server import served
from tests.server.served import (
    FINE,
    NEW,
    Connection,
    Paused,
    ask,
    client_of,
    service_of,
    until,
)


def test_a_full_queue_refuses_requests(service):
    async def asked(held):
        async with client_of(service) as client:
            create = client.completions.create
            made = [asyncio.ensure_future(create(**FINE))]
            await until(lambda: held.reached)
            made += [asyncio.ensure_future(create(**FINE)) for _ in range(served.QUEUE)]
            await until(lambda: service.engine.waiting == served.QUEUE)
            with pytest.raises(openai.RateLimitError) as refusal:
                await create(**FINE)
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            held.resume()
            return [a.choices[0].text for a in await asyncio.gather(*made)]

    with Paused(service) as held:
        texts = asyncio.run(asked(held))
    assert len(texts) == 1 + served.QUEUE and len(set(texts)) == 1
    assert 'requests_total{outcome="rejected"} 1.0' in service.metrics.text().decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_row(service, stream, prompts, plain):
    async def asked(held):
        body = FINE | dict(prompt=prompts[0], max_tokens=NEW[0], stream=stream)
        there = Connection(service, "/v1/completions", body)
        work = there.run()
        await until(lambda: held.reached)
        there.leave()
        await work
        held.resume()
        await until(lambda: service.engine.running == 0)
        made = service.engine.counts.tokens
        assert made < len(plain[0].tokens[0])
        return there.sent

    with Paused(service) as held:
        sent = asyncio.run(asked(held))
    bodies = [m.get("body", b"") for m in sent]
    assert not any(b"[DONE]" in body for body in bodies)
    assert 'outcome="cancelled"} 1.0' in service.metrics.text().decode()


def test_requests_time_out(service):
    hasty = replace(service, limits=Limits(timeout_s=0.2))

    async def nothing_comes():
        slow = Connection(hasty, "/v1/completions", FINE)
        slow.events = asyncio.Queue()
        await slow.run()
        return slow.sent[0]["status"]

    assert asyncio.run(nothing_comes()) == 408
    with Paused(service):
        status, _, answer = ask(hasty, "/v1/completions", FINE)
        assert status == 504 and "0.2 seconds" in answer["error"]["message"]
        status, _, text = ask(hasty, "/v1/completions", FINE | dict(stream=True))
    assert status == 200 and '"code":"timeout"' in text and "[DONE]" not in text


# --- when decoding fails --------------------------------------------------------------


def test_the_server_survives_a_failure(service, prompts, plain):
    advance, failures = service.engine.batch.advance, [RuntimeError("broken\nhere")]

    def fails_once():
        if failures:
            raise failures.pop()
        return advance()

    service.engine.batch.advance = fails_once
    try:
        status, _, answer = ask(service, "/v1/completions", FINE)
        assert status == 500 and answer["error"]["message"].endswith("broken here")
        body = FINE | dict(prompt=prompts[1], max_tokens=NEW[1])
        status, _, answer = ask(service, "/v1/completions", body)
    finally:
        del service.engine.batch.advance
    assert answer["choices"][0]["text"] == plain[1].texts[0]
    assert ask(service, "/health")[0] == 200


def test_repeated_failures_end_the_process(service):
    told, said = [], []

    def failing():
        raise RuntimeError("for good")

    batch = service.engine.batch
    engine = Engine(batch, served.QUEUE)
    jobs = [
        Job(TextRequest([8, 9], 4), Writer(service.reader), told.append)
        for _ in range(served.QUEUE)
    ]
    assert len(jobs) >= MAX_FAILURES * served.SIZES.rows
    engine.submit(jobs)
    app = make_app(replace(service, engine=engine))
    batch.advance = failing
    try:
        loaded = run.Ready(app, engine, "ready")
        sock = run.bound_socket("127.0.0.1", 0)
        code = run.run(lambda say: loaded, sock, said.append, 1)
    finally:
        del batch.advance
    assert code == 1 and said[0].startswith("listening on http://127.0.0.1:")
    assert said[1:] == ["ready", "stopped: decoding failed: for good"]
    assert len(told) == len(jobs) and all(isinstance(t, Failed) for t in told)
    assert ask(replace(service, engine=engine), "/health")[0] == 503
    with pytest.raises(Closed, match="for good"):
        engine.submit(jobs[:1])


def test_stopping_answers_all_requests(batch, prompts):
    service = service_of(batch)

    async def asked(held):
        body = FINE | dict(prompt=prompts[0], max_tokens=NEW[0])
        there = Connection(service, "/v1/completions", body)
        work = there.run()
        await until(lambda: held.reached)
        stopped = asyncio.ensure_future(asyncio.to_thread(service.engine.stop))
        await until(lambda: service.engine.closing)
        held.resume()
        assert await stopped
        await work
        return there.sent[0]["status"]

    with Paused(service) as held:
        assert asyncio.run(asked(held)) == 500
    batch.clear()
    assert ask(service, "/v1/completions", FINE)[0] == 503


def test_metrics_count_tokens_and_requests(service):
    ask(service, "/v1/completions", FINE | dict(stream=True))
    status, headers, text = ask(service, "/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    assert status == 200 and headers["content-type"].startswith("text/plain")
    tokens, calls = (
        float(values[f"stree_jax_{name}_total"]) for name in ("tokens", "target_calls")
    )
    by_origin = [float(v) for k, v in values.items() if "by_origin_total" in k]
    assert tokens == sum(by_origin) > 0
    assert float(values["stree_jax_tau"]) == tokens / calls >= 1
    assert values['stree_jax_requests_total{outcome="ok"}'] == "1.0"
    assert values["stree_jax_first_token_seconds_count"] == "1.0"
    assert values["stree_jax_queue_length"] == "0.0"


def test_prefill_widths(model):
    attention = replace(model.config, layers=("attention", "mlp"))
    assert reading_widths(model.config, 2048) == [2049]
    assert reading_widths(attention, 2048) == [65, 897, 2049]
    assert reading_widths(attention, 40) == [65]
