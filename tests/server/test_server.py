"""A server over a tiny model: its texts are those of `generate`, whatever comes."""

import asyncio
import json
import logging
import time
from dataclasses import replace

import jax
import numpy as np
import openai
import pytest

import stree_jax
from stree_jax import Sampling, tuning
from stree_jax.server.batch import Asked, News, reading_widths
from stree_jax.server.engine import MOST_FAILURES, Closed, Engine, Failed, Job
from stree_jax.server.service import Limits
from stree_jax.server.texts import Writer
from stree_jax.speculation.decoding import OUT_OF_LENGTH, RUNNING
from tests.server import served
from tests.server.served import (
    Connection,
    ask,
    client_of,
    held_up,
    service_of,
    until,
)
from tests.support.pieces import across, expected_stop
from tests.support.tiny import REAL

LENGTHS = [5, 1, 70, 33, 12, 100, 3]
NEW = [40, 17, 58, 30, 9, 28, 64]


@pytest.fixture(scope="module")
def model():
    return served.tiny_model()


@pytest.fixture(scope="module")
def batch(model):
    with pytest.MonkeyPatch.context() as patch:  # steps take what they are assumed to
        patch.setattr(tuning, "timed", lambda spec, decoding: spec)
        return served.warm_batch(model)


@pytest.fixture
def service(batch):
    service = service_of(batch)
    yield service
    assert service.engine.stop()
    batch.clear()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def plain(model, prompts):
    """Texts of plain decoding, each prompt by itself."""
    return [
        stree_jax.generate(model, [prompt], max_new_tokens=new, capacity=256)
        for prompt, new in zip(prompts, NEW, strict=True)
    ]


def chunk_text(chunk):
    return "".join(choice.text for choice in chunk.choices)


# Texts


def test_parallel_requests_have_the_texts_of_generate(service, prompts, plain, model):
    """Nine on three rows: greedy, drawn, streamed or with log-probabilities."""
    drawn = Sampling(0.8, top_p=0.9, seed=11)
    samples = stree_jax.generate(
        model, [prompts[4]], max_new_tokens=20, sampling=drawn, n=2, capacity=256
    )

    async def asked():
        async with client_of(service) as client:

            async def one(i):
                options = dict(model="tiny", temperature=0, max_tokens=NEW[i])
                if i % 3 == 2:
                    options["logprobs"] = 2
                if i % 2:
                    answer = await client.completions.create(
                        prompt=prompts[i], **options
                    )
                    (choice,) = answer.choices
                    return choice.text, choice.finish_reason
                stream = await client.completions.create(
                    prompt=prompts[i], stream=True, **options
                )
                parts = [chunk async for chunk in stream]
                reasons = [p.choices[0].finish_reason for p in parts]
                assert reasons[:-1] == [None] * (len(parts) - 1)
                return "".join(map(chunk_text, parts)), reasons[-1]

            both = client.completions.create(
                model="tiny",
                prompt=prompts[4],
                max_tokens=20,
                temperature=0.8,
                top_p=0.9,
                seed=11,
                n=2,
            )
            return await asyncio.gather(*(one(i) for i in range(len(prompts))), both)

    *texts, answer = asyncio.run(asked())
    wanted = [(r.texts[0], r.finish_reasons[0]) for r in plain]
    assert texts == wanted and {reason for _, reason in wanted} == {"stop", "length"}
    assert [c.text for c in answer.choices] == samples.texts
    assert [c.index for c in answer.choices] == [0, 1]
    made = int(samples.lengths.sum())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, made)


def test_log_probabilities_are_those_of_generate(service, model, prompts):
    lists = dict(max_new_tokens=12, stop_tokens=(), logprobs=2, capacity=256)
    (wanted,) = stree_jax.generate(model, [prompts[0]], **lists).logprobs

    async def asked():
        async with client_of(service) as client:
            options = dict(model="tiny", temperature=0, max_tokens=12)
            text = await client.completions.create(
                prompt=prompts[0], logprobs=2, **options
            )
            chat = await client.chat.completions.create(
                messages=[{"role": "user", "content": "abc"}],
                logprobs=True,
                top_logprobs=2,
                **options,
            )
            return text, chat

    text, chat = asyncio.run(asked())
    lists = text.choices[0].logprobs
    count = len(lists.tokens)
    assert count == text.usage.completion_tokens
    close = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lists.token_logprobs, wanted.raw[:count], **close)
    for row, top in zip(lists.top_logprobs, wanted.top_raw[:count], strict=True):
        np.testing.assert_allclose(sorted(row.values(), reverse=True), top, **close)
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_a_stop_string_ends_the_text_wherever_tokens_split(service, model, prompts):
    free = stree_jax.generate(
        model, [prompts[0]], max_new_tokens=40, capacity=256
    ).tokens[0]
    strings = across(free, 2)[:3]
    assert strings and not strings[0].isascii()

    async def asked():
        async with client_of(service) as client:
            options = dict(model="tiny", prompt=prompts[0], temperature=0)
            return await asyncio.gather(
                *(
                    client.completions.create(
                        max_tokens=40, stop=["never there", string], **options
                    )
                    for string in strings
                )
            )

    for string, answer in zip(strings, asyncio.run(asked()), strict=True):
        kept, text, found = expected_stop(free, [string])
        assert found == string
        assert answer.choices[0].text == text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(kept)


def test_streams_hold_whole_characters_and_no_stop_string(model):
    """Token by token: what is shown put together is the text."""
    reader = served.reader_of(model)
    rng = np.random.default_rng(4)
    for stops in ((), ("é€", "ab")):
        for _ in range(20):
            tokens = rng.integers(1, 29, 30).tolist()
            kept, text, found = expected_stop(tokens, stops)
            writer, shown = Writer(reader, stops), ""
            for i, token in enumerate(tokens):
                finish = OUT_OF_LENGTH if i == 29 else RUNNING
                news = News([token], np.zeros(1, np.uint8), 1, finish)
                piece = writer.write(news)
                shown += piece.text
                assert text.startswith(shown)
                if piece.finish_reason is not None:
                    break
            assert shown == text and writer.tokens == kept
            assert (piece.finish_reason == "stop") == (found is not None)


def test_chat_streams_in_the_protocol_s_shape(service):
    body = dict(
        model="tiny",
        messages=[
            {"role": "system", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": "c é"}]},
        ],
        temperature=0,
        max_completion_tokens=9,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    status, headers, text = ask(service, "/v1/chat/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    lines = text.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 9
    assert all(c["usage"] is None for c in chunks)
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[0]["delta"]["content"] == ""
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] in ("stop", "length")
        assert all(c["finish_reason"] is None for c in own[:-1])
        whole = ask(service, "/v1/chat/completions", body | WHOLE)[2]
        said = "".join(c["delta"].get("content", "") for c in own)
        assert said == whole["choices"][index]["message"]["content"]
        assert whole["usage"] == last["usage"]


WHOLE = dict(stream=False, stream_options=None)


# Refusals

FINE = dict(model="tiny", prompt="abc", max_tokens=4, temperature=0)


@pytest.mark.parametrize(
    ("change", "status", "param", "word"),
    [
        (dict(model="other"), 404, "model", "does not exist"),
        (dict(max_tokens=126), 400, "prompt", "maximum context length is 128 tokens"),
        (dict(prompt=[8] * 128, max_tokens=1), 400, "prompt", "129 tokens"),
        (dict(prompt=[REAL + 9]), 400, "prompt", "not all in the vocabulary"),
        (dict(prompt=""), 400, "prompt", "at least one token"),
        (dict(logprobs=4), 400, "logprobs", "at most 3"),
        (dict(n=10), 400, "n", "at most 9 texts"),
        (dict(prompt="a" * 5000), 413, None, "longer than 4096 bytes"),
    ],
)
def test_what_this_server_has_not(service, change, status, param, word):
    found, _, answer = ask(service, "/v1/completions", FINE | change)
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and word in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_is_no_request(service):
    for data in ("{", "[]", '"x"', "\xff", "[" * 3000):
        status, _, answer = ask(service, "/v1/completions", data)
        assert status == 400 and "JSON" in answer["error"]["message"]
    assert ask(service, "/v1/other")[0] == 404
    assert ask(service, "/v1/completions")[0] == 405
    assert ask(service, "/v1/models/tiny")[2]["id"] == "tiny"
    assert ask(service, "/v1/models/none")[0] == 404
    silent = replace(service, spell=None)
    body = dict(model="tiny", messages=[{"role": "user", "content": "a"}])
    status, _, answer = ask(silent, "/v1/chat/completions", body)
    assert status == 400 and "no chat template" in answer["error"]["message"]


def test_keys(service):
    locked = replace(service, keys=(b"first", b"second"))

    async def models(key):
        async with client_of(locked, key) as client:
            return [m.id async for m in await client.models.list()]

    assert asyncio.run(models("second")) == ["tiny"]
    for key in ("third", "secon", "first second"):
        with pytest.raises(openai.AuthenticationError):
            asyncio.run(models(key))
    assert ask(locked, "/v1/completions", FINE)[0] == 401
    assert ask(locked, "/health")[0] == ask(locked, "/metrics")[0] == 200


# Load, time, and clients that leave


def test_a_full_queue_says_so_and_others_are_served(service):
    gate, undo = held_up(service)

    async def asked():
        async with client_of(service) as client:
            made = [
                asyncio.ensure_future(client.completions.create(**FINE))
                for _ in range(served.SIZES.rows)
            ]
            await until(lambda: service.engine.running == served.SIZES.rows)
            made += [
                asyncio.ensure_future(client.completions.create(**FINE))
                for _ in range(served.QUEUE)
            ]
            await until(lambda: service.engine.waiting == served.QUEUE)
            with pytest.raises(openai.RateLimitError) as refusal:
                await client.completions.create(**FINE)
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            gate.set()
            return [a.choices[0].text for a in await asyncio.gather(*made)]

    try:
        texts = asyncio.run(asked())
    finally:
        undo()
    assert len(texts) == served.SIZES.rows + served.QUEUE and len(set(texts)) == 1
    assert 'requests_total{outcome="rejected"} 1.0' in service.metrics.text().decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_whose_client_has_left_is_free(service, stream, prompts, plain):
    gate, undo = held_up(service)

    async def asked():
        body = FINE | dict(prompt=prompts[0], max_tokens=NEW[0], stream=stream)
        there = Connection(service, "/v1/completions", body)
        work = there.run()
        await until(lambda: service.engine.running == 1)
        there.leave()
        await work
        gate.set()
        await until(lambda: service.engine.running == 0)
        made = service.engine.counts.tokens
        assert made < len(plain[0].tokens[0])
        return there.sent

    try:
        sent = asyncio.run(asked())
    finally:
        undo()
    bodies = [m.get("body", b"") for m in sent]
    assert not any(b"[DONE]" in body for body in bodies)
    assert 'outcome="cancelled"} 1.0' in service.metrics.text().decode()


def test_time_is_limited(service):
    hasty = replace(service, limits=Limits(timeout_s=0.2))
    gate, undo = held_up(service)
    try:
        status, _, answer = ask(hasty, "/v1/completions", FINE)
        assert status == 504 and "0.2 seconds" in answer["error"]["message"]
        status, _, text = ask(hasty, "/v1/completions", FINE | dict(stream=True))
        assert status == 200 and '"code":"timeout"' in text and "[DONE]" not in text

        async def nothing_comes():
            slow = Connection(hasty, "/v1/completions", FINE)
            slow.events = asyncio.Queue()
            await slow.run()
            return slow.sent[0]["status"]

        assert asyncio.run(nothing_comes()) == 408
    finally:
        gate.set()
        undo()


# When decoding fails


def test_a_failure_is_told_and_the_server_goes_on(service, prompts, plain):
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


def test_an_engine_that_only_fails_dies_and_says_why(batch):
    told, deaths = [], []

    def failing():
        raise RuntimeError("for good")

    engine = Engine(batch, 9, deaths.append)
    engine.start()
    reader = served.reader_of(batch.model)
    batch.advance = failing
    try:
        jobs = [
            Job(Asked([8, 9], 4), Writer(reader), told.append)
            for _ in range(MOST_FAILURES * served.SIZES.rows + 2)
        ]
        for job in jobs[:9]:
            engine.submit([job])
        for _ in range(500):
            if deaths:
                break
            time.sleep(0.02)
    finally:
        del batch.advance
        batch.clear()
    assert deaths == ["decoding failed: for good"] == [engine.dead]
    assert len(told) == 9 and all(isinstance(t, Failed) for t in told)
    with pytest.raises(Closed, match="for good"):
        engine.submit(jobs[9:])


def test_stopping_leaves_nobody_waiting(batch):
    service = service_of(batch)
    gate, undo = held_up(service)

    async def asked():
        there = Connection(service, "/v1/completions", FINE)
        work = there.run()
        await until(lambda: service.engine.running == 1)
        stopped = asyncio.to_thread(service.engine.stop)
        gate.set()
        assert await stopped
        await work
        return there.sent[0]["status"]

    try:
        assert asyncio.run(asked()) in (200, 500)  # it may just have ended
    finally:
        undo()
        batch.clear()
    assert ask(service, "/v1/completions", FINE)[0] == 503


def test_metrics(service):
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


def test_nothing_is_compiled_while_serving(service, prompts, model):
    """Whatever is asked, in whatever company."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    names = ("jax._src.interpreters.pxla", "jax._src.dispatch")
    with jax.log_compiles():
        for name in names:
            logging.getLogger(name).addHandler(handler)
        try:
            for i, change in enumerate(
                (
                    dict(temperature=0.7, n=3),
                    dict(logprobs=1, prompt=prompts[5], max_tokens=7),
                    dict(stop=["ab", "x"], prompt=prompts[2]),
                )
            ):
                assert ask(service, "/v1/completions", FINE | change)[0] == 200, i
        finally:
            for name in names:
                logging.getLogger(name).removeHandler(handler)
    assert not [line for line in lines if line.startswith("Compiling")], lines


def test_widths_have_the_passes_of_generate(model):
    attention = replace(model.config, layers=("attention", "mlp"))
    assert reading_widths(model.config, 2048) == [2049]
    assert reading_widths(attention, 2048) == [65, 897, 2049]
    assert reading_widths(attention, 40) == [65]
