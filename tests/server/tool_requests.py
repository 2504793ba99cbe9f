"""Requests with tools and schemas, and clients for them, that several tests share."""

import asyncio
import json

import httpx2
import pytest
from openai import AsyncOpenAI

from stree_jax.server.app import make_app
from tests.support.answer_server import answer_service, write_answer
from tests.support.table_server import ask, started

PARAMETERS = {
    "type": "object",
    "title": "Weather",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "Zürich", "days": 3}'
PIECES = [
    "I look.\n",
    "<tool_call>",
    '\n{"name": "get_weather", ',
    '"arguments": {"city": "Zü',
    'rich", "da',
    'ys": 3}}\n',
    "</tool_call>",
    '\n<tool_call>{"name": "now"}</tool_',
    "call>",
]
THOUGHTS = ["Let me ", "think.\n", "</think>", "\n\nIt ", "rains."]
USER = {"role": "user", "content": "Rain?"}
BODY = dict(messages=[USER], temperature=0, tools=[WEATHER, NOW])
PATH = "/v1/chat/completions"
HALF = "\ud800"  # half of a surrogate pair, which UTF-8 does not have
TITLED = {
    "description": "A forecast.",
    "properties": {
        "city": {"maxLength": 12, "title": "City", "type": "string"},
        "sky": {"enum": ["sunny", "rainy"], "title": "Sky", "type": "string"},
        "degrees": {
            "maximum": 40,
            "minimum": -20,
            "title": "Degrees",
            "type": "integer",
        },
    },
    "required": ["city", "sky", "degrees"],
    "title": "Weather",
    "type": "object",
    "additionalProperties": False,
}


def tool(name, parameters, **more):
    function = {"name": name, "parameters": parameters} | more
    return {"type": "function", "function": function}


CITIES = {"enum": ["Rome", "Oslo"], "type": "string"}
DAYS = {"default": 1, "type": "integer", "maximum": 9, "minimum": 0}
AGENTS_TOOL = tool(
    "weather",
    {
        "properties": {
            "city": CITIES | {"description": "The city.", "title": "City"},
            "days": DAYS | {"title": "Days"},
        },
        "required": ["city", "days"],
        "title": "weather_args",
        "type": "object",
        "additionalProperties": False,
    },
    description="Forecast.",
    strict=True,
)


def answering(pieces):
    """Returns a module's fixture: a server whose model, left alone, answers with the
    pieces; see `write_answer`."""

    @pytest.fixture(scope="module")
    def service(tmp_path_factory):
        path = write_answer(tmp_path_factory.mktemp("answers") / "model", pieces)
        with started(answer_service(path)) as service:
            yield service

    return service


def with_client(service, use):
    """Returns the result of `use(client)` for the official client."""

    async def used():
        transport = httpx2.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            options = dict(api_key="none", http_client=http, max_retries=0)
            return await use(AsyncOpenAI(base_url="http://test/v1", **options))

    return asyncio.run(used())


def posted(service, path, body):
    """Returns the answer to a request that must succeed."""
    status, _, found = ask(service, path, body)
    assert status == 200, found
    return found


def named_events(service, path, body):
    """Returns the events of a stream whose events have names."""
    status, headers, text = ask(service, path, body | dict(stream=True))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in text.split("\n\n") if event]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {e['type']}" for e in events]
    return events


def chunks_of(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def answered(service, body):
    """Returns the message and the reason for its end, of a stream, too."""
    body = body | dict(model=service.name)
    found = posted(service, PATH, body)
    if not body.get("stream"):
        (choice,) = found["choices"]
        return choice["message"], choice["finish_reason"]
    chunks = chunks_of(found)
    if body.get("stream_options"):
        assert chunks.pop()["usage"]["completion_tokens"] > 0
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    message = {"role": "assistant", "content": None}
    message["content"] = "".join(d.get("content") or "" for d in deltas) or None
    calls = {}
    for part in (part for d in deltas for part in d.get("tool_calls", ())):
        call = calls.setdefault(part["index"], part | {"function": {"arguments": ""}})
        text = call["function"]["arguments"] + part["function"]["arguments"]
        call["function"] |= part["function"] | {"arguments": text}
    message |= {"tool_calls": list(calls.values())} if calls else {}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (
        len(choices) - 1
    )
    return message, choices[-1]["finish_reason"]


def check_weather(found):
    assert list(found) == ["city", "sky", "degrees"] and len(found["city"]) <= 12
    assert found["sky"] in ("sunny", "rainy") and -20 <= found["degrees"] <= 40
