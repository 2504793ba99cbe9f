"""Test the endpoint of Anthropic's Messages API. The requests were recorded from the
package anthropic 2.14.0."""

import json
from dataclasses import replace

import pytest
from starlette.responses import JSONResponse

from stree_jax.server import anthropic_fields
from stree_jax.server.anthropic_answers import _content, failed
from stree_jax.server.calls import Call
from stree_jax.server.errors import ApiError
from stree_jax.server.split import Parts
from stree_jax.server.tools import NO_PARAMETERS
from tests.server.tool_requests import (
    ARGUMENTS,
    HALF,
    NOW,
    PIECES,
    THOUGHTS,
    TITLED,
    USER,
    answering,
    check_weather,
    named_events,
    posted,
)
from tests.support.table_server import ask

PATH = "/v1/messages"
CHAT = "/v1/chat/completions"
HELLO = dict(model="table", max_tokens=100, messages=[USER], temperature=0)
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def own(name, schema=None, **more):
    return {"name": name, "input_schema": schema or {"type": "object"}} | more


WEATHER = own("weather", SCHEMA, description="Forecast.", strict=True)
CALLS = HELLO | dict(system="Use tools.", tools=[own("get_weather"), own("now")])
DEMANDED = HELLO | dict(tools=[WEATHER], tool_choice={"type": "any"})


service = answering(["hel", "lo"])
calling = answering(PIECES)
thinking = answering(THOUGHTS)


def message_of(service, body):
    return posted(service, PATH, body)


EMPTY = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def add(block, delta):
    """Adds a delta of a stream to a block; tool input is collected as text."""
    (kind, key), *_ = ((k, v) for k, v in DELTAS.items() if k == delta["type"])
    assert block["type"] == key[0] and delta[key[1]]
    name = "text of input" if kind == "input_json_delta" else key[1]
    block[name] = block.get(name, "") + delta[key[1]]


DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def streamed(service, body):
    """Returns the message of a stream, after checks of the order of its events."""
    events = named_events(service, PATH, body)
    first, *middle, delta, last = events
    assert (first["type"], delta["type"]) == ("message_start", "message_delta")
    assert last == {"type": "message_stop"}
    message, opened = first["message"], False
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["output_tokens"] == 0
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        assert opened == (kind != "start")
        assert event["index"] == len(message["content"]) - opened
        if kind == "start":
            block = event["content_block"]
            assert EMPTY[block["type"]].items() <= block.items()
            message["content"].append(block)
        elif kind == "delta":
            add(message["content"][-1], event["delta"])
        opened = kind != "stop"
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("text of input"))
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message):
    """Returns a message without the values that differ between two answers."""
    left_out = ("id", "signature")
    content = [
        {name: v for name, v in block.items() if name not in left_out}
        for block in message["content"]
    ]
    rest = {name: v for name, v in message.items() if name not in ("id", "usage")}
    return rest | {"content": content}


def total(usage):
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({}, "hello", "end_turn"),
        (dict(max_tokens=1), "hel", "max_tokens"),
        (dict(max_tokens=1.0), "hel", "max_tokens"),
        (dict(max_tokens=0), None, "max_tokens"),
        (dict(stop_sequences=["x", "ello"]), "h", "stop_sequence"),
        (dict(stop_sequences=[]), "hello", "end_turn"),
        (dict(ignore_eos=True, max_tokens=5000), ..., "model_context_window_exceeded"),
    ],
    ids=str,
)
def test_text(service, changes, text, reason):
    body = HELLO | dict(system="Be short.", metadata={"user_id": "u"}) | changes
    found = message_of(service, body)
    assert found["id"].startswith("msg_") and found["model"] == service.name
    assert (found["type"], found["role"]) == ("message", "assistant")
    if text is not ...:
        texts = [] if text is None else [{"type": "text", "text": text}]
        assert found["content"] == texts
    stop = "ello" if reason == "stop_sequence" else None
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop)
    again = streamed(service, body)
    assert without_ids(again) == without_ids(found)
    assert total(again["usage"]) == total(found["usage"]) > 0
    assert found["usage"]["output_tokens"] == again["usage"]["output_tokens"]


def test_the_number_of_tokens(calling):
    body = {k: v for k, v in CALLS.items() if k not in ("max_tokens", "temperature")}
    status, _, found = ask(calling, f"{PATH}/count_tokens", body)
    assert status == 200
    assert found == {"input_tokens": total(message_of(calling, CALLS)["usage"])}
    null = body | dict(max_tokens=None)
    assert ask(calling, f"{PATH}/count_tokens", null)[2] == found
    status, _, found = ask(calling, f"{PATH}/count_tokens", body | dict(messages=7))
    assert (status, found["error"]["details"]["param"]) == (400, "messages")
    status, _, found = ask(calling, f"{PATH}/count_tokens", body | dict(model="x"))
    assert (status, found["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "\\ud83d!"}', {"a": "?!"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": [1e999]}', {"INVALID_JSON": '{"a": [1e999]}'}),
        ("[" * 9000, {"INVALID_JSON": "[" * 9000}),
    ],
    ids=["half a character", "a character", "NaN", "infinity", "nesting"],
)
def test_arguments_that_an_answer_cannot_contain(arguments, expected):
    (block,) = _content(Parts(calls=(Call("f", arguments),)), "", lambda *_: "a")
    assert block["input"] == expected
    assert json.loads(JSONResponse(block).body) == block


def test_tool_calls(calling):
    found = message_of(calling, CALLS)
    text, first, second = found["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (first["name"], first["input"]) == ("get_weather", json.loads(ARGUMENTS))
    assert (second["name"], second["input"]) == ("now", {})
    assert first["type"] == "tool_use" and first["id"] != second["id"]
    assert found["stop_reason"] == "tool_use"
    assert without_ids(streamed(calling, CALLS)) == without_ids(found)
    single = {"type": "auto", "disable_parallel_tool_use": True}
    one = message_of(calling, CALLS | dict(tool_choice=single))
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    none = message_of(calling, CALLS | dict(tool_choice={"type": "none"}))
    (block,) = none["content"]
    assert "<tool_call>" in block["text"] and none["stop_reason"] == "end_turn"


broken = answering(
    ['<tool_call>{"name": "f", "arguments": {"a" ', "1}}</tool_call>", " Done."]
)


def test_text_after_a_call_with_broken_arguments(broken):
    body = HELLO | dict(tools=[own("f")])
    text, call = message_of(broken, body)["content"]
    assert call["input"] == {"INVALID_JSON": '{"a" 1}'}
    assert text["text"] == "Done."
    events = ask(broken, PATH, body | dict(stream=True))[2]
    starts = [part.split('"type":"')[2] for part in events.split("_block_start\n")]
    assert [start.split('"')[0] for start in starts[1:]] == ["tool_use", "text"]
    assert r"\n" not in events.split("text_delta")[1].split("}")[0]


def test_reasoning(thinking):
    body = HELLO | dict(thinking={"type": "enabled", "budget_tokens": 1024})
    found = message_of(thinking, body)
    reasoning, text = found["content"]
    assert reasoning["thinking"] == "Let me think." and reasoning["signature"]
    assert text == {"type": "text", "text": "It rains."}
    again = streamed(thinking, body)
    assert without_ids(again) == without_ids(found)
    assert again["content"][0]["signature"]
    few = body | dict(thinking={"type": "enabled", "budget_tokens": 1})
    assert message_of(thinking, few)["content"][0]["thinking"] == "Let me"
    cut = message_of(thinking, body | dict(max_tokens=1))
    assert [block["type"] for block in cut["content"]] == ["thinking"]
    history = [USER, {"role": "assistant", "content": found["content"]}, USER]
    assert message_of(thinking, HELLO | dict(messages=history))["content"]
    off = HELLO | dict(thinking={"type": "disabled"})
    assert total(message_of(thinking, off)["usage"]) < total(found["usage"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "tool", "name": "weather"}],
    ids=lambda choice: choice["type"],
)
def test_tool_loops(service, streams, choice):
    body = DEMANDED | dict(tool_choice=choice)
    found = (streamed if streams else message_of)(service, body)
    (call,) = found["content"]
    assert call["name"] == "weather" and call["input"]["city"] in ("Rome", "Oslo")
    assert found["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"]}
    for block in (
        result | {"content": "sunny"},
        result | {"content": [{"type": "text", "text": "sunny"}], "is_error": False},
        result | {"is_error": True, "content": None},
        result,
    ):
        own = {"role": "assistant", "content": found["content"]}
        history = [USER, own, {"role": "user", "content": [block]}]
        body = HELLO | dict(tools=[WEATHER], messages=history)
        assert message_of(service, body)["content"][0]["text"] == "hello"


def test_typed_answers(service):
    form = {"type": "json_schema", "schema": TITLED}
    found = message_of(service, HELLO | dict(output_config={"format": form}))
    check_weather(json.loads(found["content"][0]["text"]))


def prompt_tokens(service, body):
    status, _, found = ask(service, CHAT, body | dict(max_tokens=1))
    assert status == 200, found
    return found["usage"]["prompt_tokens"]


def test_blocks_become_the_messages_of_a_chat(calling):
    """Both endpoints read the same conversation: the prompts have as many tokens."""
    marked = {"cache_control": {"type": "ephemeral"}}
    given = [
        {"role": "user", "content": "Rain?"},
        {"role": "user", "content": [{"type": "text", "text": "Now?"} | marked]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Yes.", "citations": None},
                {"type": "tool_use", "id": "a", "name": "now", "input": {}} | marked,
                {"type": "tool_use", "id": "b", "name": "now", "input": {"x": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "9"},
                {"type": "tool_result", "tool_use_id": "b", "content": "10"} | marked,
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    calls = [
        {"id": one, "function": {"name": "now", "arguments": arguments}}
        for one, arguments in (("a", "{}"), ("b", '{"x": [1]}'))
    ]
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Rain?\nNow?"},
        {"role": "assistant", "content": "Yes.", "tool_calls": calls}
        | {"reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "9"},
        {"role": "tool", "tool_call_id": "b", "content": "10"},
        {"role": "user", "content": "So?"},
    ]
    system = [{"type": "text", "text": "Use tools."} | marked]
    tools = [own("now", NO_PARAMETERS) | marked]
    body = HELLO | dict(messages=given, system=system, tools=tools)
    chat = dict(messages=messages, tools=[NOW])
    found = total(message_of(calling, body)["usage"])
    assert found == prompt_tokens(calling, chat)


def test_the_last_message_of_the_assistant_is_continued(service):
    last = {"role": "assistant", "content": "It is "}
    found = message_of(service, HELLO | dict(messages=[USER, last], max_tokens=1))
    chat = dict(messages=[USER, last], continue_final_message=True)
    assert total(found["usage"]) == prompt_tokens(service, chat)
    assert prompt_tokens(service, dict(messages=[USER, last])) != total(found["usage"])


# --- errors ---------------------------------------------------------------------------


def said(*blocks, role="user"):
    return dict(messages=[USER, {"role": role, "content": list(blocks)}, USER])


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
BLOCK = "messages.[1].content.[0]"


def formatted(schema):
    form = {"type": "json_schema", "schema": schema}
    return dict(output_config={"format": form})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(messages=None), "messages"),
        (dict(messages=[]), "messages"),
        (dict(messages=[7]), "messages.[0]"),
        (dict(messages=[{"role": "tool", "content": "x"}]), "messages.[0].role"),
        (dict(messages=[{"role": "user"}]), "messages.[0].content"),
        (dict(messages=[USER | {"name": "x"}]), "messages.[0].name"),
        (dict(messages=[USER | {"content": HALF}]), "messages.[0].content.text"),
        (dict(messages=[USER | {"content": 7}]), "messages.[0].content"),
        (dict(messages=[USER | {"content": "x" * 9000}]), "messages"),
        (said(7), BLOCK),
        (said({"type": "image", "source": {}}), f"{BLOCK}.type"),
        (said({"type": "text"}), f"{BLOCK}.text"),
        (said({"type": "text", "text": HALF}), f"{BLOCK}.text"),
        (said(USE), f"{BLOCK}.type"),
        (said({"type": "redacted_thinking"}, role="assistant"), f"{BLOCK}.type"),
        (said({"type": "thinking"}, role="assistant"), f"{BLOCK}.thinking"),
        (
            said({"type": "thinking", "thinking": HALF}, role="assistant"),
            f"{BLOCK}.thinking",
        ),
        (said({"type": "tool_result"}), f"{BLOCK}.tool_use_id"),
        (said({"type": "tool_result", "tool_use_id": 7}), f"{BLOCK}.tool_use_id"),
        (
            said({"type": "tool_result", "tool_use_id": "a", "content": [{}]}),
            f"{BLOCK}.content",
        ),
        (said(USE | {"input": "{}"}, role="assistant"), f"{BLOCK}.input"),
        (said(USE | {"input": {"a": HALF}}, role="assistant"), BLOCK),
        (said(USE | {"name": ""}, role="assistant"), f"{BLOCK}.name"),
        (said(USE | {"x": 1}, role="assistant"), f"{BLOCK}.x"),
        (dict(system=7), "system"),
        (dict(system=[{"type": "image"}]), "system.[0].type"),
        (dict(system=HALF), "system.text"),
        (dict(max_tokens=None), "max_tokens"),
        (dict(max_tokens=-1), "max_tokens"),
        (dict(max_tokens="5"), "max_tokens"),
        (dict(max_tokens=1.5), "max_tokens"),
        (dict(temperature=3), "temperature"),
        (dict(stop_sequences=[7]), "stop_sequences"),
        (dict(stop_sequences=["x"] * 17), "stop_sequences"),
        (dict(stream="yes"), "stream"),
        (dict(prompt="x"), "prompt"),
        ({HALF: 1}, "?"),
        (dict(container="x"), "container"),
        (dict(mcp_servers=[{}]), "mcp_servers"),
        (dict(tools=7), "tools"),
        (dict(tools=[7]), "tools.[0]"),
        (dict(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools.[0].type"),
        (dict(tools=[{"name": "f"}]), "tools.[0].input_schema"),
        (dict(tools=[own("a b")]), "tools.[0].name"),
        (dict(tools=[own("f"), own("f")]), "tools.[1].name"),
        (dict(tools=[own("f", strict=1)]), "tools.[0].strict"),
        (dict(tools=[own("f", input_examples=[{}])]), "tools.[0].input_examples"),
        (dict(tools=[own("f", {"type": "array"})]), "tools.[0].input_schema.type"),
        (dict(tools=[own("f", {"title": HALF})]), "tools"),
        (dict(tool_choice="any"), "tool_choice"),
        (dict(tool_choice={"type": "any"}), "tool_choice"),
        (dict(tools=[own("f")], tool_choice={"type": "required"}), "tool_choice.type"),
        (dict(tools=[own("f")], tool_choice={"type": "tool"}), "tool_choice.name"),
        (
            dict(tools=[own("f")], tool_choice={"type": "tool", "name": "g"}),
            "tool_choice.name",
        ),
        (
            dict(tool_choice={"type": "auto", "disable_parallel_tool_use": 1}),
            "tool_choice.disable_parallel_tool_use",
        ),
        (
            dict(
                tools=[own("f", {"type": "object", "properties": {"a": {"not": {}}}})],
                tool_choice={"type": "any"},
            ),
            "tools.[0].input_schema",
        ),
        (dict(thinking="yes"), "thinking"),
        (dict(thinking={"type": "always"}), "thinking.type"),
        (dict(thinking={"type": "adaptive", "x": 1}), "thinking.x"),
        (
            dict(thinking={"type": "enabled", "budget_tokens": "x"}),
            "thinking.budget_tokens",
        ),
        (  # the model has no token for the end of reasoning
            dict(thinking={"type": "enabled", "budget_tokens": 1024}),
            "thinking.budget_tokens",
        ),
        (
            dict(thinking={"type": "adaptive", "display": "omitted"}),
            "thinking.display",
        ),
        (dict(output_config=7), "output_config"),
        (dict(output_config={"x": 1}), "output_config.x"),
        (dict(output_config={"effort": 7}), "output_config.effort"),
        (dict(output_config={"format": {"type": "x"}}), "output_config.format.type"),
        (formatted({"not": {}}), "output_config.format.schema"),
        (formatted(7), "output_config.format"),
        (dict(metadata={"user_id": HALF}), "metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_wrong_fields_are_named(service, fields, param):
    status, _, found = ask(service, PATH, HELLO | fields)
    error = found["error"]
    assert (status, found["type"]) == (400, "error"), found
    assert error["type"] == "invalid_request_error"
    assert error["details"]["param"] == param, error
    assert param in error["message"]
    assert message_of(service, HELLO)["content"][0]["text"] == "hello"


def test_threads_have_the_code_after_which_the_package_sends_whole_histories(service):
    status, _, found = ask(service, PATH, HELLO | dict(thread={"type": "create"}))
    code = found["error"]["details"]["error_code"]
    assert (status, code) == (400, "thread_unsupported_request")


def test_errors_have_the_form_of_this_api(service):
    for body, status, kind in (
        ("[]", 400, "invalid_request_error"),
        ("{", 400, "invalid_request_error"),
        (json.dumps(HELLO | dict(model="x")), 404, "not_found_error"),
        (json.dumps(HELLO | dict(system="x" * 70000)), 413, "request_too_large"),
        (None, 405, "invalid_request_error"),
    ):
        found = ask(service, PATH, body)
        assert found[0] == status
        assert (found[2]["type"], found[2]["error"]["type"]) == ("error", kind)


def test_errors_in_streams(service):
    event = failed(ApiError(504, "No answer.", code="timeout")).decode()
    name, data = event.strip().split("\n")
    found = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and found["error"]["type"] == "timeout_error"
    assert found["type"] == "error" and found["error"]["message"] == "No answer."


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "wrong", "authorization": "Bearer secret"}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "Basic secret"}, 401),
    ],
    ids=str,
)
def test_api_keys(service, headers, status):
    guarded = replace(service, keys=(b"secret",))
    for path in (PATH, f"{PATH}/count_tokens", CHAT):
        body = {k: v for k, v in HELLO.items() if k != "max_tokens" or path == PATH}
        found = ask(guarded, path, body, headers=headers)
        assert found[0] == status
        if status == 401 and path != CHAT:
            assert found[2]["error"]["type"] == "authentication_error"


# --- requests as the package sends them -----------------------------------------------

ASKED = {"role": "user", "content": "Weather in Rome?"}
MODEL = dict(model="table", max_tokens=100, messages=[ASKED])
RUN = own(
    "weather",
    {
        "additionalProperties": False,
        "properties": {
            "city": {"description": "The city.", "title": "City", "type": "string"}
        },
        "required": ["city"],
        "type": "object",
    },
    description="Forecast.",
)
PARSED = {
    "type": "object",
    "title": "Weather",
    "properties": {
        "city": {
            "type": "string",
            "title": "City",
            "description": "{maxLength: 12}",
            "enum": ["Rome"],
        },
        "degrees": {"type": "integer", "title": "Degrees"},
    },
    "additionalProperties": False,
    "required": ["city", "degrees"],
}
SINGLE = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


def used(city):
    """Returns the messages of a round after a call, as the package dumps them."""
    call = {"id": "call_1", "input": {"city": city}, "name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}
    return [
        ASKED,
        {"role": "assistant", "content": [call | {"type": "tool_use"}]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]


RECORDED = {
    "messages.create": (MODEL | dict(system="Be short."), "end_turn"),
    "messages.stream": (
        MODEL | dict(system=[{"type": "text", "text": "x", "cache_control": {}}]),
        "end_turn",
    ),
    "messages.create with a tool": (
        MODEL | dict(tools=[WEATHER], tool_choice=SINGLE),
        "tool_use",
    ),
    "messages.create with a result": (
        MODEL | dict(tools=[WEATHER], messages=used("Rome")),
        "end_turn",
    ),
    "messages.parse": (
        MODEL
        | dict(output_config={"format": {"schema": PARSED, "type": "json_schema"}}),
        "end_turn",
    ),
    "beta.messages.tool_runner": (
        MODEL | dict(tools=[RUN], messages=used("Oslo"), thread=None),
        "end_turn",
    ),
    "thinking": (
        MODEL | dict(thinking={"type": "adaptive"}),
        "end_turn",
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_the_package(service, name, streams):
    body, reason = RECORDED[name]
    headers = {"anthropic-version": "2026-10-21", "x-api-key": "none"}
    path = f"{PATH}?beta=true" if "beta" in name else PATH
    status, _, found = ask(service, path, body, headers=headers)
    assert status == 200 and found["stop_reason"] == reason, found
    if streams:
        again = streamed(service, body)
        assert again["stop_reason"] == reason
        assert [b["type"] for b in again["content"]] == [
            b["type"] for b in found["content"]
        ]
    if name == "messages.parse":
        weather = json.loads(found["content"][0]["text"])
        assert weather["city"] == "Rome" and isinstance(weather["degrees"], int)


ODD = (7, -1, True, "x", [], {}, [[]], [{}], {"type": []}, {"type": {}}, [{"type": []}])


@pytest.mark.parametrize("name", sorted(anthropic_fields.OWN | anthropic_fields.SAME))
def test_values_of_other_types_are_answered_or_refused(service, name):
    """No value is an error of the server; the message of a refusal has the field."""
    for value in ODD:
        body = HELLO | dict(max_tokens=1) | {name: value}
        status, _, found = ask(service, PATH, body)
        if status == 404:
            assert name == "model"
        elif status == 400:
            assert found["error"]["message"].startswith(name), (value, found)
        else:
            assert status == 200, (value, found)
