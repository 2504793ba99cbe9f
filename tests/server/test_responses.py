"""Test the endpoint of OpenAI's Responses API, through the application and with the
official client. The requests have the form that clients send."""

import json

import pytest

from stree_jax.server.split import split
from tests.server.tool_requests import (
    AGENTS_TOOL,
    ARGUMENTS,
    HALF,
    NOW,
    PIECES,
    THOUGHTS,
    TITLED,
    USER,
    WEATHER,
    answered,
    answering,
    check_weather,
    named_events,
    posted,
    with_client,
)
from tests.support.table_server import ask

PATH = "/v1/responses"
FORMAT = {"type": "json_schema", "name": "weather", "schema": TITLED, "strict": True}
HELLO = dict(input="Rain?", temperature=0)


def flat(tool):
    """Returns a tool in the form of this API."""
    return {"type": "function"} | tool["function"]


CALLS = dict(
    input=[USER],
    instructions="Use tools.",
    temperature=0,
    tools=[flat(WEATHER), flat(NOW)],
)
DEMANDED = dict(
    input=[USER],
    include=[],
    instructions="Use tools.",
    max_output_tokens=100,
    tools=[flat(AGENTS_TOOL)],
    tool_choice="required",
)


service = answering(["hel", "lo"])
calling = answering(PIECES)
thinking = answering(THOUGHTS)


def response_of(service, body):
    return posted(service, PATH, body)


def events_of(service, body):
    """Returns the events of a stream, after checks of their numbers and items."""
    events = named_events(service, PATH, body)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete")
    response, items, texts = events[-1]["response"], {}, {}
    for event, kind in zip(events, kinds, strict=True):
        index = event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            items[index], texts[index] = event["item"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[index]["id"]
            texts[index] += event["delta"]
        elif kind == "output_item.done":
            assert event["item"] == response["output"][index]
        elif kind.endswith((".done", "part.added")) and "part" not in event:
            assert texts[index] == event.get("text", event.get("arguments"))
    assert len(items) == len(response["output"])
    return events


def without_ids(response):
    """Returns a response without the values that differ between two answers."""
    output = [
        {name: v for name, v in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    left_out = ("id", "created_at", "usage")
    rest = {name: v for name, v in response.items() if name not in left_out}
    return rest | {"output": output}


@pytest.mark.parametrize("limit", [None, 1])
def test_text(service, limit):
    body = HELLO | dict(instructions="Be short.", max_output_tokens=limit)
    found = response_of(service, body)
    assert found["object"] == "response" and found["id"].startswith("resp_")
    assert (found["instructions"], found["temperature"]) == ("Be short.", 0)
    (item,) = found["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    (part,) = item["content"]
    assert part["type"] == "output_text" and part["annotations"] == []
    cut = limit is not None
    assert part["text"] == ("hel" if cut else "hello")
    assert found["status"] == item["status"] == ("incomplete" if cut else "completed")
    assert (found["incomplete_details"] is not None) == cut
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    last = events_of(service, body | dict(stream=True))[-1]["response"]
    assert without_ids(last) == without_ids(found)


def test_tool_calls(calling):
    found = response_of(calling, CALLS)
    message, first, second = found["output"]
    assert message["content"][0]["text"] == "I look."
    assert (first["name"], first["arguments"]) == ("get_weather", ARGUMENTS)
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert first["type"] == "function_call" and first["call_id"] != second["call_id"]
    last = events_of(calling, CALLS)[-1]["response"]
    assert without_ids(last) == without_ids(found)


def test_a_cut_mark_of_another_call_is_no_text(calling):
    text = 'I look.\n<tool_call>{"name": "now"}</tool_call>\n'
    for mark in ("", "<", "<tool_", "<tool_call>"):
        parts = split(text + mark, calling.form, {}, final=True)
        assert parts.content == "I look." and len(parts.calls) == 1


def test_reasoning(thinking):
    body = HELLO | dict(chat_template_kwargs={"enable_thinking": True})
    found = response_of(thinking, body)
    reasoning, message = found["output"]
    text = {"type": "reasoning_text", "text": "Let me think."}
    assert reasoning["content"] == [text] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "It rains."
    last = events_of(thinking, body)[-1]["response"]
    assert without_ids(last) == without_ids(found)
    cut = response_of(thinking, body | dict(max_output_tokens=1))
    assert [item["type"] for item in cut["output"]] == ["reasoning"]
    again = [USER, *found["output"], USER]
    assert response_of(thinking, HELLO | dict(input=again))["status"] == "completed"
    short = response_of(thinking, body | dict(thinking_token_budget=1))
    assert short["output"][0]["content"][0]["text"] == "Let me"
    assert short["output"][1]["content"] == message["content"]
    banned = thinking.reader.tokenizer.token_to_id("rains.")
    found = response_of(thinking, body | dict(logit_bias={str(banned): -100}))
    assert "rains." not in found["output"][1]["content"][0]["text"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_typed_answer_with_the_openai_package(service, streams):
    async def use(client):
        options = dict(model=service.name, input="Weather?", max_output_tokens=100)
        options |= dict(text={"format": FORMAT})
        if not streams:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    found = with_client(service, use)
    check_weather(json.loads(found.output_text))
    assert found.status == "completed" and found.text.format.name == "weather"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(tool_choice={"type": "function", "name": "weather"}),
        dict(text={"format": FORMAT}),
        dict(stream_options={"include_obfuscation": False}, store=False),
    ],
    ids=str,
)
def test_tool_loops(service, streams, change):
    body = DEMANDED | change
    if streams:
        found = events_of(service, body)[-1]["response"]
    else:
        found = response_of(service, body)
    (call,) = found["output"]
    arguments = json.loads(call["arguments"])
    assert call["name"] == "weather" and arguments["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call["call_id"]}
    bare = {k: call[k] for k in ("type", "call_id", "name", "arguments")}
    for sent, output in (
        (call, "sunny"),
        (bare, [{"type": "input_text", "text": "sunny"}]),
    ):
        again = [USER, sent, result | {"output": output}]
        final = response_of(service, body | dict(input=again, tool_choice="none"))
        if "text" not in change:
            assert final["output"][0]["content"][0]["text"] == "hello"


def test_items_become_the_messages_of_a_chat(calling):
    """Both endpoints read the same conversation: the prompts have as many tokens."""
    call = {"call_id": "a", "name": "now", "arguments": "{}"}
    given = [
        {"type": "message"} | USER,
        {"type": "reasoning", "id": "r", "summary": [{"type": "x", "text": "Hm."}]},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "id": "f", "status": "completed"} | call,
        {"type": "function_call"} | call | {"call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "9"},
        {"type": "function_call_output", "call_id": "b", "output": "9"},
    ]
    calls = [
        {"id": one, "function": {"name": "now", "arguments": "{}"}} for one in "ab"
    ]
    messages = [
        {"role": "system", "content": "Use tools."},
        USER,
        {"role": "assistant", "content": "Yes.", "tool_calls": calls}
        | {"reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "9"},
        {"role": "tool", "tool_call_id": "b", "content": "9"},
    ]
    found = response_of(calling, CALLS | dict(input=given))
    body = dict(messages=messages, tools=[WEATHER, NOW], temperature=0)
    _, _, chat = ask(calling, "/v1/chat/completions", body)
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    message, _ = answered(calling, body)
    assert len(message["tool_calls"]) == 2


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
CALL = {"type": "function_call", "call_id": "a", "name": "f"}
PROBLEM = {"type": "json_schema", "name": "x", "schema": {"not": {}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(input=None), "input"),
        (dict(input=[]), "input"),
        (dict(input=[7]), "input.[0]"),
        (dict(input=HALF), "input.content"),
        (dict(input="x" * 9000), "input"),
        (dict(input=[USER, IMAGE]), "input.[1].content"),
        (dict(input=[{"content": "x"}]), "input.[0]"),
        (dict(input=[{"type": "item_reference", "id": "x"}]), "input.[0].type"),
        (dict(input=[USER, CALL]), "input.[1].arguments"),
        (dict(input=[CALL | {"arguments": HALF}]), "input.[0]"),
        (dict(input=[CALL | {"arguments": "", "x": 1}]), "input.[0].x"),
        (dict(input=[{"type": "function_call_output"}]), "input.[0].call_id"),
        (
            dict(input=[{"type": "function_call_output", "call_id": "a"}]),
            "input.[0].output.content",
        ),
        (dict(input=[{"type": "reasoning", "content": "x"}]), "input.[0].content"),
        (dict(instructions=7), "instructions"),
        (dict(instructions=HALF), "instructions"),
        (dict(messages=[USER]), "messages"),
        (dict(tools=7), "tools"),
        (dict(tools=[7]), "tools.[0].type"),
        (dict(tools=[{"type": "web_search"}]), "tools.[0].type"),
        (dict(tools=[flat(NOW) | {"name": "a b"}]), "tools.[0].name"),
        (dict(tools=[WEATHER]), "tools.[0].function"),
        (dict(tool_choice="required"), "tool_choice"),
        (
            dict(tools=[flat(NOW)], tool_choice={"type": "function", "name": "x"}),
            "tool_choice.name",
        ),
        (
            dict(
                tools=[flat(NOW) | {"parameters": {"properties": {"a": {"not": {}}}}}],
                tool_choice="required",
            ),
            "tools.[0].parameters",
        ),
        (dict(text=7), "text"),
        (dict(text={"color": 1}), "text.color"),
        (dict(text={"format": 7}), "text.format"),
        (dict(text={"format": {"type": "x"}}), "text.format.type"),
        (dict(text={"format": PROBLEM}), "text.format.schema"),
        (dict(text={"format": PROBLEM | {"name": 7}}), "text.format.name"),
        (dict(reasoning={"effort": 7}), "reasoning.effort"),
        (dict(reasoning={"budget": 7}), "reasoning.budget"),
        (dict(max_output_tokens="x"), "max_output_tokens"),
        (dict(previous_response_id="x"), "previous_response_id"),
        (dict(background=True), "background"),
        (dict(include=["message.output_text.logprobs"]), "include"),
        (dict(user=HALF), "user"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_wrong_fields_are_named(service, fields, param):
    status, _, found = ask(service, PATH, HELLO | fields)
    error = found["error"]
    assert (status, error["param"]) == (400, param), error
    assert response_of(service, HELLO)["output"][0]["content"][0]["text"] == "hello"


def test_bodies_that_are_no_objects(service):
    for body in ("[]", "{", "7"):
        assert ask(service, PATH, body)[0] == 400


def test_other_endpoints_are_named(service):
    status, _, found = ask(service, "/v1/embeddings", dict(input="x"))
    assert status == 404 and "does not support embeddings" in found["error"]["message"]
    assert ask(service, f"{PATH}/resp_1")[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt="hello"),
        dict(messages=[USER], add_special_tokens=False),
        dict(messages=[USER], tools=[WEATHER], add_generation_prompt=False),
    ],
    ids=str,
)
def test_tokens_of_a_prompt(service, body):
    status, _, found = ask(service, "/tokenize", body | dict(return_token_strs=True))
    assert status == 200 and found["count"] == len(found["tokens"])
    assert len(found["token_strs"]) == found["count"] < found["max_model_len"]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = ask(service, path, body | dict(max_tokens=1))[2]
    assert answer["usage"]["prompt_tokens"] == found["count"]
    text = ask(service, "/detokenize", dict(tokens=found["tokens"]))[2]["prompt"]
    assert text == body.get("prompt", text) and (text == "hello") != ("<|im_" in text)
    plain = ask(service, "/tokenize", body | dict(model=service.name))[2]
    assert plain == found | {"token_strs": None}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", dict(prompt=["a", "b"]), "prompt"),
        ("/tokenize", dict(prompt="a", add_special_tokens=False), "add_special_tokens"),
        ("/tokenize", dict(prompt="a", return_token_strs=7), "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", dict(tokens=["a"]), "tokens"),
        ("/detokenize", dict(tokens=[10**9]), "tokens"),
        ("/detokenize", dict(tokens=[-1]), "tokens"),
        ("/detokenize", dict(tokens=[], x=1), "x"),
    ],
    ids=str,
)
def test_wrong_fields_of_tokens_are_named(service, path, body, param):
    status, _, found = ask(service, path, body)
    assert (status, found["error"]["param"]) == (400, param)
    assert ask(service, path, "[]")[0] == 400
