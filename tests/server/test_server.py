"""Test a server of a tiny model: its texts are those of `generate`."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import openai
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.server.engine import Job
from stree_jax.server.rows import RowUpdate, TextRequest
from stree_jax.server.texts import Writer
from stree_jax.speculation.decoding import OUT_OF_LENGTH, RUNNING
from tests.server import served
from tests.server.served import (
    FINE,
    NEW,
    Connection,
    ask,
    client_of,
    until,
)
from tests.support.pieces import across, expected_stop
from tests.support.tiny import REAL


def check_offsets(lists):
    """Checks the offsets of tokens in a text, chunk by chunk."""
    given = [part for part in lists if part is not None]
    data = [bytes_of(token) for part in given for token in part.tokens]
    offsets = [place for part in given for place in part.text_offset]
    assert offsets == [whole_characters(b"".join(data[:i])) for i in range(len(data))]


def bytes_of(name):
    """Returns the bytes of a token from its name in a completion."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return b"" if name == "<|end|>" else name.encode()


def whole_characters(data):
    """Returns how many characters of a text begin and end in its first bytes."""
    text = data.decode("utf-8", "replace")
    for size in range(1, min(4, len(data) + 1)):  # an unfinished character at the end
        if is_unfinished(data[-size:]):
            return len(data[:-size].decode("utf-8", "replace"))
    return len(text)


def is_unfinished(data):
    """True if further bytes can make one character of the bytes."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def chunk_text(chunk):
    return "".join(choice.text for choice in chunk.choices)


# --- texts ----------------------------------------------------------------------------


def test_parallel_requests_match_generate(service, prompts, plain, model):
    """Nine requests on three rows: greedy, sampled, streamed, or with
    log-probabilities."""
    drawn = Sampling(0.8, top_p=0.9, seed=11)
    samples = stree_jax.generate(
        model,
        [prompts[4]],
        max_new_tokens=20,
        sampling=drawn,
        n=2,
        capacity=256,
        drafter=None,
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
                check_offsets([p.choices[0].logprobs for p in parts])
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


def test_log_probabilities_match_generate(service, model, prompts):
    lists = dict(max_new_tokens=12, stop_tokens=(), logprobs=2, capacity=256)
    (wanted,) = stree_jax.generate(model, [prompts[0]], **lists, drafter=None).logprobs

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
    joined = b"".join(bytes(entry.bytes) for entry in chat.choices[0].logprobs.content)
    assert joined.decode("utf-8", "replace") == chat.choices[0].message.content
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6
        if entry.token != "<|end|>":
            assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_stop_strings_across_tokens(service, model, prompts):
    free = stree_jax.generate(
        model,
        [prompts[0]],
        max_new_tokens=40,
        capacity=256,
        drafter=None,
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


def test_a_stop_string_frees_the_row(service, prompts, plain):
    """Even if the request has other texts that are still running."""
    free, told = plain[0].tokens[0], []
    string = min(across(free, 2), key=lambda s: len(expected_stop(free, [s])[0]))
    reader = service.reader
    job = Job(TextRequest(prompts[0], NEW[0]), Writer(reader, [string]), told.append)
    service.engine.submit([job])
    asyncio.run(until(lambda: told and told[-1].finish_reason and not running(service)))
    steps = 2 * served.SIZES.steps * 5  # of at most five tokens
    kept = len(expected_stop(free, [string])[0])
    assert service.engine.counts.tokens <= kept + steps < len(free)


def running(service):
    return service.engine.running


def test_streams_hold_whole_characters_and_no_stop_string(model):
    """For each token, the shown pieces joined are the text."""
    reader = served.reader_of(model)
    rng = np.random.default_rng(4)
    for stops in ((), ("é€", "ab")):
        for _ in range(20):
            tokens = rng.integers(1, 29, 30).tolist()
            kept, text, found = expected_stop(tokens, stops)
            writer, shown = Writer(reader, stops), ""
            for i, token in enumerate(tokens):
                finish = OUT_OF_LENGTH if i == 29 else RUNNING
                news = RowUpdate([token], np.zeros(1, np.uint8), 1, finish)
                piece = writer.write(news)
                shown += piece.text
                assert text.startswith(shown)
                if piece.finish_reason is not None:
                    break
            assert shown == text and writer.tokens == kept
            assert (piece.finish_reason == "stop") == (found is not None)


def test_chat_streams_follow_the_protocol(service):
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


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "param", "word"),
    [
        (dict(model="other"), 404, "model", "does not exist"),
        (dict(prompt=[8] * 128), 400, "prompt", "context length is 128 tokens"),
        (dict(prompt=[8] * 200, max_tokens=1), 400, "prompt", "200 tokens"),
        (dict(prompt=[REAL + 9]), 400, "prompt", "not all in the vocabulary"),
        (dict(prompt=""), 400, "prompt", "at least one token"),
        (dict(logprobs=4), 400, "logprobs", "at most 3"),
        (dict(n=10), 400, "n", "at most 9 texts"),
        (dict(prompt="a" * 5000), 413, None, "longer than 4096 bytes"),
    ],
)
def test_unsupported_values_are_refused(service, change, status, param, word):
    found, _, answer = ask(service, "/v1/completions", FINE | change)
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and word in error["message"]
    assert error["type"] == "invalid_request_error"


def test_max_tokens_are_limited_by_the_context(service):
    """As in llama.cpp: the text is the one without a limit."""
    prompt = [8] * 100
    bodies = [FINE | dict(prompt=prompt, max_tokens=n) for n in (28, 29, 10**9, -1)]
    answers = [ask(service, "/v1/completions", body)[2] for body in bodies]
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    assert all(a["usage"]["total_tokens"] <= 128 for a in answers)
    body = FINE | dict(prompt=prompt, ignore_eos=True, max_tokens=999)
    answer = ask(service, "/v1/completions", body)[2]
    assert answer["usage"]["completion_tokens"] == 28
    assert answer["choices"][0]["finish_reason"] == "length"


def test_malformed_requests_are_refused(service):
    for data in ("{", "[]", '"x"', "\xff", "[" * 3000):
        status, _, answer = ask(service, "/v1/completions", data)
        assert status == 400 and "JSON" in answer["error"]["message"]

    async def in_parts():
        long = Connection(service, "/v1/completions", FINE)
        long.events = asyncio.Queue()
        for _ in range(6):
            part = {"type": "http.request", "body": b" " * 1000, "more_body": True}
            long.events.put_nowait(part)
        await long.run()
        return long.sent[0]["status"]

    assert asyncio.run(in_parts()) == 413  # without a Content-Length
    assert ask(service, "/v1/other")[0] == 404
    assert ask(service, "/v1/completions")[0] == 405
    assert ask(service, "/v1/models/tiny")[2]["id"] == "tiny"
    assert ask(service, "/v1/models/none")[0] == 404
    silent = replace(service, spell=None)
    body = dict(model="tiny", messages=[{"role": "user", "content": "a"}])
    status, _, answer = ask(silent, "/v1/chat/completions", body)
    assert status == 400 and "no chat template" in answer["error"]["message"]


def test_api_keys(service):
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
