"""Test tools, tool calls and reasoning in chats, through the application and with the
official client."""

import json
import re

import pytest

from stree_jax.server.answers import empty_answer
from stree_jax.server.chat_format import CHANNEL_TOKENS
from stree_jax.server.marks import showing
from stree_jax.server.protocol import parse
from stree_jax.server.split import Splitter
from tests.server.tool_requests import (
    ARGUMENTS,
    BODY,
    NOW,
    PATH,
    PIECES,
    THOUGHTS,
    USER,
    WEATHER,
    answering,
    chunks_of,
    with_client,
)
from tests.server.tool_texts import forms_of
from tests.support import table_models
from tests.support.answer_server import answer_service, write_answer
from tests.support.table_server import CHATML, ask, started, write_table

service = answering(PIECES)
thinking = answering(THOUGHTS)


def test_calls_of_a_whole_answer(service):
    status, _, answer = ask(service, PATH, BODY)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look." and "reasoning_content" not in message
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    ids = {first["id"], second["id"]}
    assert len(ids) == 2
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", one) for one in ids)


def test_calls_of_a_stream(service):
    text = ask(service, PATH, BODY | dict(stream=True))[2]
    chunks = chunks_of(text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert "".join(d.get("content") or "" for d in deltas) == "I look."
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    first = [call for call in calls if call["index"] == 0]
    assert first[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert first[0]["type"] == "function" and first[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} for call in first[1:])
    pieces = [call["function"]["arguments"] for call in first[1:]]
    assert len(pieces) > 1 and "".join(pieces) == ARGUMENTS
    assert {call["index"] for call in calls} == {0, 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("n", [1, 2])
def test_calls_with_the_openai_package(service, n):
    async def whole(client):
        return await client.chat.completions.create(model="table", n=n, **BODY)

    async def streamed(client):
        options = dict(model="table", n=n, **BODY)
        options |= dict(stream_options={"include_usage": True})
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    answers = [with_client(service, use) for use in (whole, streamed)]
    assert answers[0].usage == answers[1].usage
    for answer in answers:
        assert len(answer.choices) == n
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look."
            first, second = choice.message.tool_calls
            assert (first.function.name, second.function.name) == ("get_weather", "now")
            assert json.loads(first.function.arguments) == {"city": "Zürich", "days": 3}


def test_a_second_round(service):
    """The calls and their results are rendered as a template of Hermes does."""
    message = ask(service, PATH, BODY)[2]["choices"][0]["message"]
    call = message["tool_calls"][0]
    parts = [{"type": "text", "text": "sunny"}]
    for content in ("sunny", parts):
        for text in (None, ""):
            own = message | dict(content=text, tool_calls=[call])
            result = {"role": "tool", "tool_call_id": call["id"], "content": content}
            body = BODY | dict(messages=[USER, own, result])
            assert ask(service, PATH, body)[0] == 200
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    function = call["function"] | {"arguments": json.loads(ARGUMENTS)}
    messages[1]["tool_calls"] = [call | {"function": function}]
    ids = service.spell(messages, parsed(BODY).turn)
    text = service.model.tokenizer.decode(ids, skip_special_tokens=False)
    schema = {k: v for k, v in WEATHER["function"].items() if k != "strict"}
    tool = json.dumps({"type": "function", "function": schema})
    assert f"system\n{tool}\n" in text
    assert text.endswith(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def parsed(body):
    return parse("chat", body)


def test_at_most_one_call_without_parallel_calls(service):
    body = BODY | dict(parallel_tool_calls=False)
    (choice,) = ask(service, PATH, body)[2]["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == [
        "get_weather"
    ]
    calls = [
        call
        for chunk in chunks_of(ask(service, PATH, body | dict(stream=True))[2])
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert {call["index"] for call in calls} == {0}


def test_text_without_calls(service):
    """Without tools, or with tool_choice "none", calls are text. Special tokens are
    left out, as in every text."""
    plain = "".join(PIECES).replace("<tool_call>", "", 1).replace("</tool_call>", "", 1)
    for change in (dict(tools=[]), dict(tools=None), dict(tool_choice="none")):
        (choice,) = ask(service, PATH, BODY | change)[2]["choices"]
        assert choice["message"]["content"] == plain
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    (choice,) = ask(service, PATH, BODY | dict(parse_tool_calls=False))[2]["choices"]
    assert choice["message"]["content"] == plain


def test_a_call_that_is_cut(service):
    body = BODY | dict(max_tokens=5)
    (choice,) = ask(service, PATH, body)[2]["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Zürich", "da'


def test_log_probabilities_list_all_tokens(service):
    body = BODY | dict(logprobs=True)
    (choice,) = ask(service, PATH, body)[2]["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [*PIECES, "<|im_end|>"]
    streamed = [
        entry["token"]
        for chunk in chunks_of(ask(service, PATH, body | dict(stream=True))[2])
        if (lists := chunk["choices"][0]["logprobs"])
        for entry in lists["content"]
    ]
    assert streamed == tokens


# --- reasoning ------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_reasoning_that_the_prompt_opens(thinking, tools):
    body = dict(messages=[USER], temperature=0, tools=tools)
    body |= dict(chat_template_kwargs={"enable_thinking": True})
    message = ask(thinking, PATH, body)[2]["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me think."
    assert message["content"] == "It rains."
    chunks = chunks_of(ask(thinking, PATH, body | dict(stream=True))[2])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    reasoning = "".join(d.get("reasoning_content", "") for d in deltas)
    content = "".join(d.get("content", "") for d in deltas)
    assert (reasoning, content) == ("Let me think.", "It rains.")
    again = dict(messages=[USER, message, USER])
    assert ask(thinking, PATH, body | again)[0] == 200


def test_reasoning_stays_in_the_content_on_request(thinking):
    body = dict(messages=[USER], temperature=0)
    body |= dict(chat_template_kwargs={"enable_thinking": True})
    for change in (dict(reasoning_format="none"), dict(separate_reasoning=False)):
        message = ask(thinking, PATH, body | change)[2]["choices"][0]["message"]
        assert message["content"] == "".join(THOUGHTS)
        assert "reasoning_content" not in message
    body |= dict(chat_template_kwargs={})  # the prompt opens no reasoning
    message = ask(thinking, PATH, body)[2]["choices"][0]["message"]
    assert message["content"] == "".join(THOUGHTS)


def test_channels(tmp_path):
    """As of gpt-oss, whose marks are special tokens."""
    template = (
        "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>"
        "{{ m.content }}{{ m.tool_calls }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}<|channel|>"
    ).replace("<|channel|>", "{# <|channel|> #}")
    pieces = [" to=functions.", "now", "<|channel|>", "commentary ", "<|constrain|>"]
    pieces += ["json", "<|message|>", '{"a": ', "1}", "<|call|>"]
    path = write_answer(tmp_path / "model", pieces, template, CHANNEL_TOKENS)
    with started(answer_service(path)) as service:
        message = ask(service, PATH, BODY)[2]["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": '{"a": 1}'}
        assert message["content"] is None
        plain = ask(service, PATH, BODY | dict(tools=[]))[2]["choices"][0]["message"]
        assert plain["content"] == '{"a": 1}'


def test_special_tokens_are_shown_on_request():
    """Those within the marks only, also by a tokenizer of SentencePiece."""
    for tokenizer in (table_models.byte_level(), table_models.spm()):
        special = ["<tool_call>", "<|other|>"]
        tokenizer.add_special_tokens(special)
        assert showing(tokenizer, frozenset({"<think>"})) is tokenizer
        shown = showing(tokenizer, frozenset({"<tool_call>\n"}))
        text = f"Hello{special[0]}a b{special[1]}c"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert shown.decode(ids).replace(" ", "") == "Hello<tool_call>abc"
        assert tokenizer.decode(ids).replace(" ", "") == "Helloabc"


# --- errors ---------------------------------------------------------------------------


def tool(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("change", "param", "word"),
    [
        (dict(tools={}), "tools", "want a list"),
        (
            dict(tools=[tool(description="\ud800")]),
            "tools.[0].function",
            "whole characters",
        ),
        (dict(tools=[7]), "tools.[0].type", "function"),
        (dict(tools=[{"type": "custom"}]), "tools.[0].type", "function"),
        (dict(tools=[{"type": "function"}]), "tools.[0].function", "an object"),
        (dict(tools=[NOW, tool(name="a b")]), "tools.[1].function.name", "1..64"),
        (dict(tools=[tool(name="a" * 65)]), "tools.[0].function.name", "1..64"),
        (dict(tools=[tool(name=None)]), "tools.[0].function.name", "None"),
        (dict(tools=[NOW, NOW]), "tools.[1].function.name", "another tool"),
        (dict(tools=[tool(parameters=[])]), "tools.[0].function.parameters", "object"),
        (dict(tools=[tool(strict="yes")]), "tools.[0].function.strict", "true"),
        (dict(tools=[tool(description=7)]), "tools.[0].function.description", "text"),
        (dict(tools=[tool(color="red")]), "tools.[0].function.color", "not support"),
        (dict(tool_choice="any"), "tool_choice", "required"),
        (dict(tool_choice={"type": "allowed_tools"}), "tool_choice", "required"),
        (dict(tool_choice=NAMED, tools=[]), "tool_choice", "needs tools"),
        (dict(tool_choice="required", tools=[]), "tool_choice", "needs tools"),
        (
            dict(tool_choice=NAMED, tools=[WEATHER]),
            "tool_choice.function.name",
            "name of a tool",
        ),
        (dict(parallel_tool_calls="no"), "parallel_tool_calls", "true or false"),
        (dict(reasoning_format="x"), "reasoning_format", "one of"),
    ],
)
def test_wrong_fields_are_named(service, change, param, word):
    status, _, answer = ask(service, PATH, BODY | change)
    error = answer["error"]
    assert (status, error["param"]) == (400, param)
    assert word in error["message"] and error["message"].startswith(param)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (7, ""),
        ({"id": "\ud800", "function": {"name": "f"}}, ".id"),
        ({"type": "custom"}, ".type"),
        ({"id": 7, "function": {"name": "f"}}, ".id"),
        ({"id": "a"}, ".function"),
        ({"function": {"name": ""}}, ".function.name"),
        ({"function": {"name": "f", "arguments": 7}}, ".function.arguments"),
        ({"function": {"name": "f", "extra": 7}}, ".function.extra"),
    ],
)
def test_wrong_calls_of_messages_are_named(service, call, param):
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    status, _, answer = ask(service, PATH, BODY | dict(messages=[USER, message, USER]))
    expected = f"messages.[1].tool_calls.[0]{param}"
    assert (status, answer["error"]["param"]) == (400, expected)


def test_only_answers_have_calls(service):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    message = USER | {"tool_calls": [call]}
    answer = ask(service, PATH, BODY | dict(messages=[message]))[2]
    assert answer["error"]["param"] == "messages.[0].tool_calls"
    for arguments in ("", "null", "{not json", '{"a": 1}', '{"a": "\\ud800"}'):
        own = call | {"function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [own]}
        body = BODY | dict(messages=[USER, message, USER])
        assert ask(service, PATH, body)[0] == 200


@pytest.mark.parametrize(
    ("opening", "pattern"),
    [
        ("<tool_call>", r"call_\w{24}"),
        ("[TOOL_CALLS]", r"[a-zA-Z0-9]{9}"),
        ("<|tool_calls_section_begin|>", r"functions\.f:[12]"),
    ],
)
def test_ids_of_calls(opening, pattern):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    request = parsed(BODY | dict(messages=[USER, asked, USER]))
    for form in forms_of(opening):
        answer = empty_answer(request, 1, 1, Splitter(form, {}))
        ids = [answer.call_id(0, i, "f") for i in (0, 1, 0)]
        assert all(re.fullmatch(pattern, one) for one in ids)
        assert ids[0] == ids[2] != ids[1]


def test_named_choices_hide_the_other_tools():
    request = parsed(BODY | dict(tool_choice=NAMED))
    assert [tool["function"]["name"] for tool in request.turn.tools] == ["now"]
    assert (request.tool_use.choice, request.tool_use.name) == ("function", "now")
    assert len(parsed(BODY | dict(tool_choice="none")).turn.tools) == 2


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (CHATML, "does not use tools"),
        (CHATML + "{% for t in tools or [] %}{{ t }}{% endfor %}", "cannot read"),
    ],
)
def test_templates_without_tools(tmp_path, template, word):
    with started(answer_service(write_table(tmp_path / "model", template))) as service:
        status, _, answer = ask(service, PATH, BODY)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert word in answer["error"]["message"]


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget_tokens"])
def test_a_budget_ends_reasoning(thinking, name):
    """The model goes on behind the end of its reasoning as usual."""
    body = dict(messages=[USER], temperature=0)
    opened = dict(chat_template_kwargs={"enable_thinking": True})
    for budget, reasoning in ((1, "Let me"), (0, None), (99, "Let me think."), (-1, 1)):
        answer = ask(thinking, PATH, body | opened | {name: budget})[2]
        message = answer["choices"][0]["message"]
        wanted = "Let me think." if reasoning == 1 else reasoning
        assert message.get("reasoning_content") == wanted, budget
        assert message["content"] == "It rains."
    typed = dict(guided_choice=["yes", "no"], temperature=1, seed=3)
    answer = ask(thinking, PATH, body | opened | typed | {name: 1})[2]
    message = answer["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert ask(thinking, PATH, body | {name: 5})[0] == 200  # without reasoning


def test_a_budget_needs_tokens_of_reasoning(service):
    for wrong in (-2, "5", 2**15 + 1):
        body = BODY | dict(thinking_token_budget=wrong)
        status, _, answer = ask(service, PATH, body)
        assert status == 400 and answer["error"]["param"] == "thinking_token_budget"
    body = dict(messages=[USER], temperature=0, thinking_token_budget=5)
    status, _, answer = ask(service, PATH, body)
    assert status == 400 and "does not mark the end" in answer["error"]["message"]
