"""Test requests as clients' packages send them: typed answers, demanded calls, and the
round after a call.

The bodies were recorded from openai 3.57.0, openai-agents 0.24.0, pydantic-ai-slim
2.68.0, langchain-openai 1.7.4 and litellm 1.110.2.
"""

import json

import pytest

from tests.server.tool_requests import (
    AGENTS_TOOL,
    CITIES,
    DAYS,
    HALF,
    PATH,
    TITLED,
    USER,
    answered,
    answering,
    check_weather,
    tool,
)
from tests.support.table_server import ask

PLAIN = {
    "properties": {
        "city": {"maxLength": 12, "type": "string"},
        "sky": {"enum": ["sunny", "rainy"], "type": "string"},
        "degrees": {"maximum": 40, "minimum": -20, "type": "integer"},
    },
    "required": ["city", "sky", "degrees"],
    "type": "object",
    "additionalProperties": False,
}


def json_schema(name, schema):
    own = {"schema": schema, "name": name, "strict": True}
    return {"type": "json_schema", "json_schema": own}


OPENAI = dict(messages=[USER], model="smollm2", max_tokens=100)
AGENTS = dict(
    messages=[{"content": "Answer in JSON.", "role": "system"}, USER],
    model="smollm2",
    max_tokens=100,
)
PYDANTIC = dict(
    messages=[USER],
    model="smollm2",
    max_completion_tokens=100,
    stream=False,
    temperature=0,
)
LANGCHAIN = dict(
    messages=[{"content": "Weather in Rome?", "role": "user"}],
    model="smollm2",
    max_completion_tokens=100,
    stream=False,
    temperature=0.0,
)
LITELLM = dict(messages=[USER], model="smollm2", max_tokens=100, temperature=0)
USAGE = {"include_usage": True}
# Each client's request for a typed answer, and what it adds to stream it.
TYPED = {
    "openai": (
        OPENAI | dict(stream=False, response_format=json_schema("Weather", TITLED)),
        dict(stream=True),
    ),
    "openai-agents": (
        AGENTS | dict(response_format=json_schema("final_output", TITLED)),
        dict(stream=True, stream_options=USAGE),
    ),
    "pydantic-ai": (
        PYDANTIC | dict(response_format=json_schema("Weather", PLAIN)),
        dict(stream=True, stream_options=USAGE),
    ),
    "langchain-openai": (
        LANGCHAIN | dict(response_format=json_schema("Weather", TITLED)),
        dict(stream=True),
    ),
    "litellm": (
        LITELLM | dict(response_format=json_schema("Weather", TITLED)),
        dict(stream=True),
    ),
}
PARAMETERS = {
    "properties": {"city": CITIES, "days": DAYS},
    "required": ["city", "days"],
    "type": "object",
    "additionalProperties": False,
}
ONE = {"type": "function", "function": {"name": "weather"}}
OPENAI_TOOL = tool("weather", PARAMETERS, strict=True, description="Forecast.")
PYDANTIC_TOOLS = [
    tool("weather", PARAMETERS | {"required": ["city"]}, description="Forecast."),
    tool("final_result", PLAIN, description="A forecast.", strict=True),
]
LOOSE = {key: PARAMETERS[key] for key in ("properties", "type")} | {
    "required": ["city"]
}
# Each client's request that demands a call, what it adds to stream it, the fields of
# the next request, and the keys of a call that the client sends back.
LOOPS = {
    "openai": (
        OPENAI | dict(tools=[OPENAI_TOOL], tool_choice="required", stream=False),
        dict(stream=True),
        dict(tool_choice=None),
        dict(parsed_arguments={"city": "Rome", "days": 1}),
    ),
    "openai-agents": (
        AGENTS | dict(tools=[AGENTS_TOOL], tool_choice="required"),
        dict(stream=True),
        dict(tool_choice=None),
        {},
    ),
    "openai-agents typed": (
        AGENTS
        | dict(tools=[AGENTS_TOOL], tool_choice=ONE)
        | dict(response_format=json_schema("final_output", TITLED)),
        dict(stream=True, parallel_tool_calls=True),
        dict(tool_choice=None, response_format=None),
        {},
    ),
    "pydantic-ai": (
        PYDANTIC | dict(tools=PYDANTIC_TOOLS, tool_choice="required"),
        dict(stream=True, stream_options=USAGE),
        dict(tool_choice="auto"),
        {},
    ),
    "langchain-openai": (
        LANGCHAIN
        | dict(tools=[tool("weather", LOOSE, description="")])
        | dict(tool_choice=ONE, parallel_tool_calls=False),
        dict(stream=True),
        dict(tool_choice=None, parallel_tool_calls=None),
        {},
    ),
    "litellm": (
        LITELLM
        | dict(tools=[OPENAI_TOOL], tool_choice="required")
        | dict(parallel_tool_calls=False),
        dict(stream=True, stream_options=USAGE),
        dict(tool_choice=None, parallel_tool_calls=None),
        {},
    ),
}
# Fields that clients add to the message that they send back.
OF_MESSAGES = {
    "openai": dict(
        content="", refusal=None, annotations=None, audio=None, function_call=None
    )
    | dict(parsed=None),
    "litellm": dict(provider_specific_fields={"refusal": None}, function_call=None),
}


service = answering(["hel", "lo"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("client", TYPED)
def test_typed_answers(service, client, streams):
    body, streamed = TYPED[client]
    message, reason = answered(service, body | (streamed if streams else {}))
    check_weather(json.loads(message["content"]))
    assert reason == "stop" and "tool_calls" not in message


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("client", LOOPS)
def test_tool_loops(service, client, streams):
    body, streamed, following, of_calls = LOOPS[client]
    body |= streamed if streams else {}
    message, reason = answered(service, body)
    (call,) = message["tool_calls"]
    function = call["function"]
    arguments = json.loads(function["arguments"])
    assert reason == "tool_calls" and not message["content"] and call["id"]
    if function["name"] == "final_result":
        check_weather(arguments)
    else:
        assert function["name"] == "weather" and arguments["city"] in ("Rome", "Oslo")
    again = {key: call[key] for key in ("id", "type")} | {"function": function}
    again["function"] |= of_calls
    own = {"role": "assistant", "content": None, "tool_calls": [again]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [*body["messages"], own | OF_MESSAGES.get(client, {}), result]
    message, reason = answered(service, body | following | dict(messages=messages))
    assert (message["content"], reason) == ("hello", "stop")


# --- malformed requests ---------------------------------------------------------------


def parameters(schema):
    return dict(tools=[tool("f", schema)], tool_choice="required")


def structured(schema):
    return dict(response_format=json_schema("x", schema))


def named(**fields):
    described = json_schema("x", {})["json_schema"] | fields
    return dict(response_format={"type": "json_schema", "json_schema": described})


def of(**schema):
    return {"type": "object", "properties": {"a": schema}}


def with_call(name, arguments):
    call = {"id": "a", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return dict(messages=[USER, message, USER])


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMA, FUNCTION = "response_format.json_schema", "tools.[0].function"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(tools=[None]), "tools.[0].type"),
        (dict(tools=[{"type": "function", "name": "f"}]), "tools.[0].name"),
        (dict(tools=[tool("f", True)]), f"{FUNCTION}.parameters"),
        (dict(tools=[tool(HALF, {})]), f"{FUNCTION}.name"),
        (dict(tools=[tool("f", {}, description=HALF)]), FUNCTION),
        (dict(tools=[tool("f", {"title": HALF})]), FUNCTION),
        (dict(tools=[tool("f", {}) for _ in range(129)]), "tools"),
        (parameters({"type": "array"}), f"{FUNCTION}.parameters.type"),
        (parameters({"type": ["object"]}), f"{FUNCTION}.parameters.type"),
        (parameters({"properties": []}), f"{FUNCTION}.parameters.properties"),
        (parameters({"required": "a"}), f"{FUNCTION}.parameters"),
        (parameters(of(**{"$ref": "#/$defs/x"})), f"{FUNCTION}.parameters"),
        (parameters(of(**{"$ref": "#"})), f"{FUNCTION}.parameters"),
        (parameters(of(type="string", pattern="(")), f"{FUNCTION}.parameters"),
        (parameters(of(type="string", pattern="(?=a)b")), f"{FUNCTION}.parameters"),
        (parameters(of(**nested(300))), f"{FUNCTION}.parameters"),
        (structured(nested(300)), f"{SCHEMA}.schema"),
        (structured(of(enum=[])), f"{SCHEMA}.schema"),
        (structured(of(enum=[HALF])), f"{SCHEMA}.schema"),
        (structured(of(type="integer", minimum=10**300)), f"{SCHEMA}.schema"),
        (structured(of(type="string", maxLength=10**12)), f"{SCHEMA}.schema"),
        (structured(of(type="array", minItems=-1)), f"{SCHEMA}.schema"),
        (structured({"if": {}, "then": {}}), f"{SCHEMA}.schema"),
        (structured({"anyOf": []}), f"{SCHEMA}.schema"),
        (structured(False), SCHEMA),
        (structured("{}"), SCHEMA),
        (named(name=7), f"{SCHEMA}.name"),
        (named(strict="yes"), f"{SCHEMA}.strict"),
        (named(description=[]), f"{SCHEMA}.description"),
        (dict(response_format={"type": []}), "response_format.type"),
        (dict(response_format={"type": "json_schema"}), SCHEMA),
        (dict(guided_regex=HALF), "guided_regex"),
        (dict(guided_regex="(" * 999 + ")" * 999), "guided_regex"),
        (dict(guided_choice=[]), "guided_choice"),
        (dict(guided_choice=[1]), "guided_choice"),
        (dict(guided_json="7"), "guided_json"),
        (dict(structured_outputs={"json": {}, "regex": "a"}), "structured_outputs"),
        (dict(tool_choice={"type": "function", "function": 7}), "tool_choice"),
        (with_call("f", [1]), "messages.[1].tool_calls.[0].function.arguments"),
        (with_call("f", HALF), "messages.[1].tool_calls.[0].function"),
        (with_call(HALF, "{}"), "messages.[1].tool_calls.[0].function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_requests_are_refused(service, fields, param):
    body = dict(messages=[USER], max_tokens=4) | fields
    status, _, found = ask(service, PATH, body)
    assert (status, found["error"]["param"]) == (400, param)
    assert found["error"]["message"].startswith(param)


def test_malformed_requests_do_not_disturb_the_others(service):
    body, _ = TYPED["openai"]
    expected = answered(service, body | dict(temperature=0))
    for fields in (structured(nested(300)), parameters({"type": "array"})):
        assert ask(service, PATH, dict(messages=[USER]) | fields)[0] == 400
        assert answered(service, body | dict(temperature=0)) == expected
