"""Test requests that other servers accept.

The names of fields and the shapes of messages come from the `openai` package's types.
"""

import json
from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessage,
    ParsedChatCompletionMessage,
    chat_completion_assistant_message_param,
    chat_completion_user_message_param,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)

from stree_jax.checkpoints.load import load
from stree_jax.server.batch import Batch
from stree_jax.server.engine import Engine
from stree_jax.server.errors import ApiError
from stree_jax.server.metrics import Metrics
from stree_jax.server.protocol import Turn, parse
from stree_jax.server.rows import Sizes
from stree_jax.speculation.default_tree import spec_for
from tests.support.table_server import (
    CHATML,
    ask,
    spell_of,
    started,
    table_service,
    write_table,
)

USER = {"role": "user", "content": "hi"}
CHAT = dict(model="m", messages=[USER])
TEXT = dict(model="m", prompt="x")


def answered(**fields):
    return parse("chat", CHAT | dict(messages=[USER, fields, USER])).messages[1]


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("chat", chat_create_params.CompletionCreateParamsStreaming),
        ("completion", completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_no_field_of_the_openai_package_is_unknown(kind, types):
    """Each is either accepted, or refused with a reason."""
    names = set(get_type_hints(types))
    assert {"model", "stream", "seed"} <= names
    for name in names:
        try:
            parse(kind, (CHAT if kind == "chat" else TEXT) | {name: object()})
        except ApiError as error:
            assert error.code != "unknown_parameter", name
            assert error.param == name


IGNORED = [
    dict(store=True),
    dict(metadata={"a": "b"}),
    dict(user="u"),
    dict(service_tier="flex"),
    dict(safety_identifier="s"),
    dict(prompt_cache_key="k"),
    dict(prompt_cache_options={"mode": "explicit"}),
    dict(prompt_cache_retention="24h"),
    dict(prediction={"type": "content", "content": "x"}),
    dict(verbosity="low"),
    dict(priority=3, request_id="r", kv_transfer_params={"a": 1}),
    dict(cache_prompt=False, n_cache_reuse=256, backend_sampling=True),
    {"speculative.n_max": 16, "speculative.p_min": 0.5},
    dict(parallel_tool_calls=False, parse_tool_calls=True),
    dict(tools=[], tool_choice="auto"),
    dict(tool_choice="auto"),
    dict(functions=[], function_call="none"),
    dict(response_format={"type": "text"}),
    dict(presence_penalty=0, frequency_penalty=0.0, n=1, logit_bias={}),
    dict(stream_options={"include_usage": True, "include_obfuscation": False}),
    dict(reasoning_format="auto", n_indent=0, n_cmpl=1, response_fields=[]),
    dict(include_reasoning=True, truncate_prompt_tokens=None, bad_words=[]),
]


@pytest.mark.parametrize("fields", IGNORED, ids=lambda fields: "-".join(fields))
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_fields_without_effect_change_nothing(kind, fields):
    body = CHAT if kind == "chat" else TEXT
    assert parse(kind, body | fields) == parse(kind, body)


def test_hidden_padding_of_streams_may_be_turned_off():
    for value in (True, False):
        options = {"include_usage": True, "include_obfuscation": value}
        request = parse("chat", CHAT | dict(stream=True, stream_options=options))
        assert request.usage and request.stream


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_spellings_of_max_tokens(kind):
    """With several, the first in this order counts, as in llama.cpp (and vLLM)."""
    body = CHAT if kind == "chat" else TEXT
    names = {"n_predict": 3, "max_completion_tokens": 4, "max_tokens": 5}
    while names:
        first = next(iter(names.values()))
        assert parse(kind, body | names).max_tokens == first
        assert parse(kind, body | {next(iter(names)): -1}).max_tokens is None
        names.pop(next(iter(names)))
    assert parse(kind, body | dict(max_tokens=2**40)).max_tokens == 2**31 - 1


def test_reasoning_effort_reaches_the_chat_template(tmp_path):
    template = "{{ reasoning_effort }} {{ messages[0].content }}"
    spell = spell_of(write_table(tmp_path / "model", template))
    plain = spell_of(write_table(tmp_path / "plain", CHATML))

    def ids(spell, **fields):
        request = parse("chat", CHAT | fields)
        return spell(request.messages, request.turn)

    assert ids(spell, reasoning_effort="low") != ids(spell, reasoning_effort="high")
    kwargs = {"reasoning_effort": "high"}
    own = ids(spell, reasoning_effort="low", chat_template_kwargs=kwargs)
    assert own == ids(spell, reasoning_effort="high")
    assert ids(plain, reasoning_effort="low") == ids(plain)


# --- messages of other servers --------------------------------------------------------

URL = {"type": "url_citation", "url_citation": dict(end_index=1, start_index=0)}
URL["url_citation"] |= dict(title="t", url="http://x")


@pytest.mark.parametrize("exclude", [{}, dict(exclude_none=True)])
@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (dict(content="yes"), dict(content="yes")),
        (dict(content=None), dict(content="")),
        (dict(content=None, refusal="no"), dict(content="no")),
        (dict(content="yes", tool_calls=[]), dict(content="yes")),
        (dict(content="yes", annotations=[URL]), dict(content="yes")),
        (
            dict(content="yes", reasoning="why"),  # vLLM, OpenRouter, Ollama
            dict(content="yes", reasoning="why", reasoning_content="why"),
        ),
        (
            dict(content="yes", reasoning_content="why", reasoning=None),
            dict(content="yes", reasoning_content="why"),
        ),
        (
            dict(content="yes", provider_specific_fields={"refusal": None}),
            dict(content="yes"),
        ),
        (
            dict(content="yes", reasoning_details=[{"type": "reasoning.text"}]),
            dict(content="yes"),
        ),
    ],
)
def test_answers_dumped_by_the_openai_package_are_accepted(fields, found, exclude):
    message = ChatCompletionMessage.model_validate({"role": "assistant"} | fields)
    for dumped in (
        message.model_dump(**exclude),
        json.loads(message.model_dump_json()),
    ):
        assert answered(**dumped) == {"role": "assistant"} | found


def test_a_parsed_answer_is_accepted():
    message = ParsedChatCompletionMessage(
        role="assistant", content='{"a": 1}', parsed={"a": 1}
    )
    assert answered(**message.model_dump())["content"] == '{"a": 1}'


def test_an_answer_of_this_server_is_accepted_back():
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice["message"] = {"role": "assistant", "content": "yes", "refusal": None}
    body = dict(id="x", object="chat.completion", created=1, model="m")
    answer = ChatCompletion.model_validate(body | {"choices": [choice]})
    dumped = answer.choices[0].message.model_dump()
    assert answered(**dumped) == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "types",
    [
        chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam,
        chat_completion_user_message_param.ChatCompletionUserMessageParam,
    ],
)
def test_null_fields_of_a_message_are_accepted(types):
    nulls = dict.fromkeys(get_type_hints(types))
    message = nulls | dict(role="assistant", content="yes")
    assert answered(**message) == {"role": "assistant", "content": "yes"}


def test_parts_of_a_content_are_accepted():
    """Types of parts of chats and, as in vLLM, of responses."""
    breakpoint_ = {"mode": "explicit"}
    parts = [
        {"type": "text", "text": "a", "prompt_cache_breakpoint": breakpoint_},
        {"type": "output_text", "text": "b", "annotations": [URL]},
        {"type": "refusal", "refusal": "c"},
        {"type": "input_text", "text": "d"},
    ]
    assert answered(role="assistant", content=parts)["content"] == "abcd"


def test_reasoning_is_rendered_as_by_transformers(tmp_path):
    """Under both names, with the text that jinja2 gives as transformers calls it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    path = write_table(tmp_path / "model", template)
    tokenizer = load(path).tokenizer
    history = [USER, dict(role="assistant", content="b", reasoning_content="why"), USER]
    (texts, _) = render_jinja_template([history], chat_template=template)
    for name in ("reasoning", "reasoning_content"):
        messages = [USER, {"role": "assistant", "content": "b", name: "why"}, USER]
        request = parse("chat", CHAT | dict(messages=messages))
        ids = spell_of(path)(request.messages, request.turn)
        assert tokenizer.decode(ids, skip_special_tokens=False) == texts[0]


# --- cached tokens and timings --------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("cached") / "model")
    model = load(path)
    sizes = Sizes(rows=2, context=256, steps=8, top_logprobs=2, prefix_memory=2**24)
    batch = Batch(model, spec_for(model, None, None, None, None), sizes)
    engine = Engine(batch, 4)
    service = table_service(path, engine=engine, metrics=Metrics(engine))
    with started(service) as service:
        yield service


def test_cached_tokens_of_a_conversation(service):
    """A second user's prompt begins with the system prompt; the next turn begins with
    the whole text; an answer is generated again from the end of its prompt."""
    system = {"role": "system", "content": "be kind " * 12}
    spell = service.spell

    def asked(*messages, **fields):
        body = dict(messages=messages, temperature=0) | fields
        status, _, answer = ask(service, "/v1/chat/completions", body)
        assert status == 200
        return answer

    def user(text):
        return {"role": "user", "content": text}

    first = (system, user("one two"))
    prompt = spell(first, Turn())
    answer = asked(*first)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    answered = answer["choices"][0]["message"]
    assert answered["content"] == "xyz"
    turn = (*first, answered, user("more"))
    other = (system, user("another"))
    shared = spell((system, user("")), Turn(begins=False))
    shared = (
        len(shared)
        - len(spell((user(""),), Turn(begins=False)))
        + len(service.model.tokenizer.encode("<|im_start|>user\n").ids)
    )
    for messages, cached in (
        (turn, len(prompt) + 3),  # all but the end of turn, which was not read
        (other, shared),
        (first, len(prompt) - 1),
    ):
        answer = asked(*messages)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        assert answer["choices"][0]["message"]["content"] == "xyz"
        times, usage = answer["timings"], answer["usage"]
        assert times["cache_n"] == cached
        assert times["prompt_n"] == usage["prompt_tokens"] - cached
        assert times["predicted_n"] == usage["completion_tokens"] == 4
        for name in ("prompt", "predicted"):
            seconds = times[f"{name}_ms"] / 1000
            assert 0 < seconds < 100
            per_second = times[f"{name}_n"] / seconds
            assert times[f"{name}_per_second"] == pytest.approx(per_second)


def test_streams_have_cached_tokens_and_timings(service):
    body = dict(messages=[{"role": "user", "content": "abc " * 30}], temperature=0)
    for options in (None, {"include_usage": True}):
        stream = dict(stream=True, stream_options=options)
        text = ask(service, "/v1/chat/completions", body | stream)[2]
        lines = [line.removeprefix("data: ") for line in text.split("\n\n")[:-2]]
        *before, last = map(json.loads, lines)
        assert not any("timings" in chunk for chunk in before)
        assert last["timings"]["predicted_n"] == 4
        if options:
            details = last["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == last["timings"]["cache_n"] > 64
