"""Test answers that follow a schema, an expression or a demanded call."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from stree_jax.constraints.expression import byte_automaton
from stree_jax.constraints.free_text import with_free_text
from stree_jax.constraints.reasoning import after_reasoning, anything
from stree_jax.constraints.token_tables import token_tables
from stree_jax.sampling.constraints import NONE
from stree_jax.sampling.requests import Requests
from stree_jax.server.calls import JsonCalls
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.constrained import ConstrainedRows
from stree_jax.server.constraints import constraint_of
from stree_jax.server.formats import FORMATS, REASONING
from stree_jax.server.protocol import parse
from stree_jax.server.split import split
from stree_jax.speculation.decoding import Decoding
from tests.server.tool_requests import (
    ARGUMENTS,
    BODY,
    NOW,
    PATH,
    PIECES,
    USER,
    WEATHER,
    answered,
    answering,
    tool,
)
from tests.server.tool_texts import SCHEMAS, TEXTS, forms_of
from tests.support.answer_server import HERMES, answer_service, write_answer
from tests.support.table_server import CHATML, ask, started, write_table

PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["kind", "age", "name"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CHAT = dict(messages=[USER], max_tokens=90)
LIMITED = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
}
TOOLS = [
    {"type": "function", "function": LIMITED},
    {"type": "function", "function": {"name": "now"}},
]
TOOL_CHAT = dict(messages=[USER], max_tokens=120, tools=TOOLS)
NAMED = {"type": "function", "function": {"name": "get_weather"}}


service = answering(["hel", "lo"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Returns a server with a chat template without tools."""
    path = write_table(tmp_path_factory.mktemp("plain") / "model", CHATML)
    with started(answer_service(path)) as service:
        yield service


def no_token(text):
    return False


def content_of(service, **changes):
    status, _, found = ask(service, PATH, CHAT | changes)
    assert status == 200, found
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def is_person(text):
    found = json.loads(text)
    assert text == json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    assert list(found) == ["kind", "age", "name"]
    assert found["kind"] in ("red", "blue") and 0 <= found["age"] <= 99
    return isinstance(found["name"], str) and len(found["name"]) <= 4


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "fields",
    [
        dict(response_format=FORMAT),
        dict(response_format={"type": "json_object", "schema": PERSON}),
        dict(guided_json=PERSON),
        dict(guided_json=json.dumps(PERSON)),
        dict(json_schema=PERSON),
        dict(structured_outputs={"json": PERSON}),
    ],
    ids=lambda fields: " ".join(fields),
)
def test_answers_are_valid_for_the_schema(service, fields, temperature):
    assert is_person(content_of(service, temperature=temperature, seed=3, **fields))


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (dict(guided_choice=["yes", "no!"]), ["yes", "no!"]),
        (dict(structured_outputs={"choice": ["a"]}), ["a"]),
        (dict(guided_regex="x{3}"), ["xxx"]),
        (dict(regex="(?:ab){2}"), ["abab"]),
        (dict(response_format={"type": "text"}), ["hello"]),
    ],
    ids=str,
)
def test_other_demands(service, fields, texts):
    assert content_of(service, temperature=0, **fields) in texts


def test_completions_are_constrained_and_streamed(service):
    body = dict(prompt="x", max_tokens=60, temperature=0)
    status, _, found = ask(service, "/v1/completions", body | dict(guided_json=PERSON))
    assert status == 200 and is_person(found["choices"][0]["text"])
    status, _, events = ask(
        service, PATH, CHAT | dict(response_format=FORMAT, stream=True)
    )
    parts = [json.loads(line[6:]) for line in events.splitlines() if "{" in line]
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts)
    assert status == 200 and is_person(text)


def test_rows_of_a_batch_have_their_own_constraints(service):
    """Constrained and free texts together, each as if it were alone."""
    bodies = [
        dict(response_format=FORMAT, temperature=0),
        dict(temperature=0),
        dict(guided_regex="[0-9]{7}", temperature=1, seed=1),
        dict(guided_choice=["yes", "no"], temperature=0, logprobs=True),
        dict(temperature=0),
    ]
    alone = [content_of(service, **body) for body in bodies]

    async def all_at_once():
        calls = [asyncio.to_thread(content_of, service, **body) for body in bodies]
        return await asyncio.gather(*calls)

    assert asyncio.run(all_at_once()) == alone
    assert alone[1] == alone[4] == "hello"


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1])
def test_demanded_calls_are_valid(service, choice, temperature):
    body = TOOL_CHAT | dict(tool_choice=choice, temperature=temperature, seed=5)
    status, _, found = ask(service, PATH, body)
    assert status == 200, found
    (choice_,) = found["choices"]
    (call,) = choice_["message"]["tool_calls"]
    assert choice_["finish_reason"] == "tool_calls"
    assert choice_["message"]["content"] in (None, "")
    if choice == NAMED:
        assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert list(arguments) == ["city", "days"] and 1 <= arguments["days"] <= 9
        assert len(arguments["city"]) <= 6
    else:
        assert arguments == {}


def test_a_demanded_call_goes_before_a_response_format(service):
    """Agents with an output type force a tool so. The format is for the content."""
    body = TOOL_CHAT | dict(tool_choice="required", response_format=FORMAT)
    (choice,) = ask(service, PATH, body)[2]["choices"]
    message = choice["message"]
    assert len(message["tool_calls"]) == 1 and not message["content"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "problem"),
    [
        (PATH, dict(response_format=3), "response_format", "want an object"),
        (
            PATH,
            dict(response_format=FORMAT | {"json_schema": {"schema": {"type": "x"}}}),
            "response_format.json_schema.schema",
            r"$.type",
        ),
        (
            PATH,
            dict(response_format=FORMAT | {"grammar": "x"}),
            "response_format.grammar",
            "does not support",
        ),
        (PATH, dict(guided_json={"not": {}}), "guided_json", "$.not"),
        (PATH, dict(guided_json="{"), "guided_json", "guided_json: "),
        (PATH, dict(guided_regex="("), "guided_regex", "does not compile"),
        (PATH, dict(guided_choice="yes"), "guided_choice", "list of texts"),
        (PATH, dict(regex="a", guided_regex="a"), "regex", "only one of"),
        (
            PATH,
            dict(TOOL_CHAT, tool_choice="required", guided_json=PERSON),
            "guided_json",
            "cannot be combined",
        ),
        (
            PATH,
            dict(
                tools=[
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"not": {}}}},
                        },
                    }
                ],
                tool_choice="required",
            ),
            "tools.[0].function.parameters",
            "$.properties.a.not",
        ),
    ],
    ids=str,
)
def test_what_is_not_enforced_is_refused(service, path, fields, param, problem):
    status, _, found = ask(service, path, CHAT | fields)
    error = found["error"]
    assert (status, error["param"]) == (400, param), error
    assert problem in error["message"] and "\n" not in error["message"]
    assert content_of(service, temperature=0) == "hello"


def test_a_template_without_tools_still_structures(plain):
    assert is_person(content_of(plain, response_format=FORMAT, temperature=0))
    status, _, found = ask(plain, PATH, CHAT | dict(TOOL_CHAT, tool_choice="required"))
    assert status == 400 and found["error"]["param"] == "tools"


def test_structure_or_a_call(service):
    """With tools and "auto", the answer is the structure or calls of the tools."""
    request = parse("chat", BODY | dict(response_format=FORMAT))
    none = frozenset()
    automaton = byte_automaton(
        constraint_of(request, service.form, False, none, no_token).regex
    )

    def ends(text):
        state = 0
        for byte in text.encode():
            state = automaton.steps[state, byte]
            if state < 0:
                return False
        return bool(automaton.may_end[state])

    assert ends('{"kind":"red","age":7,"name":"x"}')
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    rain = '{"name": "get_weather", "arguments": {"city": "x", "days": 3}}'
    assert ends(now) and ends(f"{now}\n<tool_call>{rain}</tool_call>")
    assert not ends("hello") and not ends("<tool_call>hello</tool_call>")
    assert not ends(now.replace("now", "later")) and not ends(now.replace("{}", "7"))
    one = replace(request, tool_use=replace(request.tool_use, parallel=False))
    automaton = byte_automaton(
        constraint_of(one, service.form, False, none, no_token).regex
    )
    assert ends(now) and not ends(now + now)
    special = constraint_of(
        request, service.form, False, frozenset(["<tool_call>"]), no_token
    )
    assert special.special == ("<tool_call>",) and "\U0010fff0" in special.regex


def test_reasoning_is_not_constrained():
    request = parse("chat", CHAT | dict(guided_choice=["yes"]))
    form = ChatFormat(reasoning=REASONING[0])
    automaton = byte_automaton(
        constraint_of(request, form, True, frozenset(), no_token).regex
    )
    for text, good in (
        ("I think.</think>\n\nyes", True),
        ("a < b <i> [x]</think>yes", True),
        ("yes", False),
        ("x</think>no", False),
    ):
        state = 0
        for byte in text.encode():
            state = automaton.steps[state, byte] if state >= 0 else NONE
        assert (state >= 0 and bool(automaton.may_end[state])) == good, text
    assert "<think>" in HERMES


def test_rows_keep_their_automata():
    tables = [
        token_tables(byte_automaton(regex), [b"a", b"b", b"c"], 3, lambda data: [])
        for regex in ("a+b", "(?:abc){9}")
    ]
    rows = ConstrainedRows(3)
    rows.set(1, tables[0])
    first = rows._states.tolist()
    rows.set(2, tables[1])
    rows.set(1, None)
    assert first == [NONE, 0, NONE] and rows._states.tolist() == [NONE, NONE, 0]
    assert rows._active == [False, False, True] and np.array_equal(rows._sizes, (29, 4))


def test_a_very_large_automaton_does_not_enlarge_later_ones():
    small, long = anything(3), after_reasoning(anything(3), 2**15, 0)
    d = Decoding(**dict.fromkeys(Decoding.__annotations__))
    d = replace(d, requests=Requests(None, None, None, None, None))
    rows = ConstrainedRows(2)

    def sizes():
        return rows.part_of(d).requests.constraints.following.shape[1:]

    rows.set(0, small)
    before = sizes()
    rows.set(1, long)
    assert sizes()[0] > 2**15
    rows.set(1, None)
    rows.set(0, small)
    assert sizes() == before


# --- strict tools with tool_choice "auto" ---------------------------------------------

CITIES = {"type": "string", "enum": ["Rome", "Oslo"]}
STRICT = {"type": "object", "properties": {"city": CITIES}, "required": ["city"]}


def strict_tool(schema, strict=True, name="get_weather"):
    return tool(name, schema, strict=strict)


calling = answering(PIECES)


def auto(service, tools, **changes):
    """Returns the content and the calls of an answer."""
    body = dict(messages=[USER], max_tokens=200, temperature=0, tools=tools)
    message, _ = answered(service, body | changes)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"], [(f["name"], f["arguments"]) for f in functions]


@pytest.mark.parametrize("streams", [False, True])
def test_strict_calls_follow_their_schemas(calling, streams):
    free = auto(calling, [strict_tool(STRICT, False), NOW], stream=streams)
    assert free == ("I look.", [("get_weather", ARGUMENTS), ("now", "{}")])
    content, calls = auto(calling, [strict_tool(STRICT), NOW], stream=streams)
    assert content.startswith("I look.") and calls[0][0] == "get_weather"
    assert json.loads(calls[0][1])["city"] in ("Rome", "Oslo")
    good = tool("get_weather", WEATHER["function"]["parameters"], strict=True)
    assert auto(calling, [good, NOW], stream=streams) == free
    _, calls = auto(calling, [strict_tool(STRICT, name="other")], stream=streams)
    assert calls and {name for name, _ in calls} == {"other"}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_text_without_calls_is_that_without_strict(service, temperature, seed):
    settings = dict(temperature=temperature, seed=seed, max_tokens=24)
    free = auto(service, [strict_tool(STRICT, False)], **settings)
    assert auto(service, [strict_tool(STRICT)], **settings) == free
    assert free[0] and free[1] == []


def test_an_opening_within_reasoning_opens_no_call(tmp_path_factory):
    pieces = ["Say <tool_", "call> ", "now.", "</think>", "It ", "rains."]
    path = write_answer(tmp_path_factory.mktemp("r") / "model", pieces, special=())
    thinking = dict(chat_template_kwargs={"enable_thinking": True})
    with started(answer_service(path)) as service:
        own = dict(messages=[USER], temperature=0, tools=[strict_tool(STRICT)])
        message, _ = answered(service, own | thinking)
        assert message["reasoning_content"] == "Say <tool_call> now."
        assert message["content"] == "It rains."
        _, calls = auto(service, [strict_tool(STRICT)])  # no reasoning: it is a call
        assert json.loads(calls[0][1])["city"] in ("Rome", "Oslo")


def test_strict_schemas_that_cannot_be_enforced_are_refused(calling):
    unknown = {"type": "object", "properties": {"a": {"not": {}}}}
    body = dict(messages=[USER], tools=[NOW, strict_tool(unknown)])
    status, _, found = ask(calling, PATH, body)
    assert (status, found["error"]["param"]) == (400, "tools.[1].function.parameters")
    assert "$.properties.a.not" in found["error"]["message"]
    tools = [strict_tool(unknown, False), strict_tool(STRICT, name="f")]
    assert auto(calling, tools)[1][0] == ("get_weather", ARGUMENTS)


JSON_TEXTS = [
    (form, text)
    for opening, text in TEXTS
    for form in forms_of(opening)
    if isinstance(form.calls.read, JsonCalls) and not form.calls.at_start
    if "tool_name" not in text  # another name of the key
    and [name for name, _ in split(text, form, SCHEMAS, final=True).calls]
    == ["get_weather", "now"]
]


@pytest.mark.parametrize(("form", "text"), JSON_TEXTS, ids=lambda x: str(x)[:40])
def test_calls_as_models_write_them_are_allowed(form, text):
    properties = {key: SCHEMAS["get_weather"][key] for key in ("city", "days")}
    schema = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tools = [strict_tool(schema), NOW]
    request = parse("chat", dict(messages=[USER], tools=tools))
    constraint = constraint_of(request, form, False, frozenset(), no_token)
    part = byte_automaton(constraint.regex)
    steps, may_end = with_free_text(part, constraint.behind)[0]
    for around in ("", "I look.\n"):
        state = 0
        for byte in (around + text).encode():
            state = steps[state, byte] if state >= 0 else NONE
        assert state >= 0, text
    wrong = (around + text.replace('"get_weather"', '"later"')).encode()
    state = 0
    for byte in wrong:
        state = steps[state, byte] if state >= 0 else NONE
    assert state < 0 and may_end[0]


def test_other_formats_are_free():
    request = parse("chat", dict(messages=[USER], tools=[strict_tool(STRICT)]))
    others = [f for f in FORMATS if not isinstance(f.read, JsonCalls) or f.at_start]
    for format_ in (None, *others):
        form = ChatFormat(tools=True, calls=format_)
        assert constraint_of(request, form, False, frozenset(), no_token) is None
    form = ChatFormat(tools=True, calls=next(f for f in FORMATS if f not in others))
    assert constraint_of(request, form, False, frozenset(), no_token).behind is not None
    off = replace(request, parse_calls=False)
    assert constraint_of(off, form, False, frozenset(), no_token) is None
