"""Test which requests the parser refuses, and the parameter that it names."""

import pytest

from stree_jax import Sampling
from stree_jax.server.errors import ApiError
from stree_jax.server.protocol import parse

TEXT = dict(model="m", prompt="x")
CHAT = dict(model="m", messages=[{"role": "user", "content": "x"}])


def message(**fields):
    return [{"role": "user", "content": "x"} | fields]


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        ("chat", dict(tools=[{"type": "function"}]), "tools.[0].function"),
        ("chat", dict(tool_choice="required"), "tool_choice"),
        ("chat", dict(response_format={"type": "xml"}), "response_format.type"),
        (
            "chat",
            dict(response_format={"type": "json_schema"}),
            "response_format.json_schema",
        ),
        ("chat", dict(moderation={"model": "m"}), "moderation"),
        ("chat", dict(web_search_options={}), "web_search_options"),
        ("chat", dict(guided_json={"not": {}}), "guided_json"),
        ("chat", dict(guided_grammar="x"), "guided_grammar"),
        ("chat", dict(guided_regex=3), "guided_regex"),
        ("chat", dict(guided_choice=[]), "guided_choice"),
        ("chat", dict(guided_regex="a", regex="b"), "regex"),
        ("chat", dict(structured_outputs={"grammar": "x"}), "structured_outputs"),
        ("chat", dict(unknown=0), "unknown"),
        ("chat", dict(reasoning_effort=3), "reasoning_effort"),
        ("chat", dict(logit_bias={"five": 1}), "logit_bias"),
        ("chat", dict(logit_bias={"1" * 5000: 1}), "logit_bias"),
        ("chat", dict(presence_penalty=3), "presence_penalty"),
        ("chat", dict(frequency_penalty=-3), "frequency_penalty"),
        ("chat", dict(echo=True), "echo"),
        ("chat", dict(prompt="x"), "prompt"),
        ("chat", dict(logprobs=3), "logprobs"),
        ("chat", dict(top_logprobs=3), "top_logprobs"),
        ("chat", dict(max_tokens="3", max_completion_tokens=3), "max_tokens"),
        ("chat", dict(messages=[]), "messages"),
        ("chat", dict(messages=["x"]), "messages.[0]"),
        ("chat", dict(messages=message(tool_calls=[1])), "messages.[0].tool_calls"),
        ("chat", dict(messages=message(content=None)), "messages.[0].content"),
        (
            "chat",
            dict(messages=message(content=[{"type": "image_url"}])),
            "messages.[0].content",
        ),
        ("completion", dict(echo=3), "echo"),
        ("completion", dict(echo=True, logprobs=1), "echo"),
        ("completion", dict(suffix="x"), "suffix"),
        ("completion", dict(best_of=2), "best_of"),
        ("completion", dict(logprobs=True), "logprobs"),
        ("completion", dict(min_tokens=17), "min_tokens"),
        ("completion", dict(cache_salt=""), "cache_salt"),
        ("completion", dict(cache_salt=3), "cache_salt"),
        ("completion", dict(repetition_penalty=0), "repetition_penalty"),
        ("completion", dict(model=7), "model"),
        ("completion", dict(prompt=None), "prompt"),
        ("completion", dict(prompt=[]), "prompt"),
        ("completion", dict(prompt=["a", [1, True]]), "prompt"),
        ("completion", dict(prompt="\ud800"), "prompt"),
        ("completion", dict(max_tokens=-2), "max_tokens"),
        ("completion", dict(max_tokens=2.5), "max_tokens"),
        ("completion", dict(max_tokens=True), "max_tokens"),
        ("completion", dict(temperature=2.1), "temperature"),
        ("completion", dict(temperature=float("nan")), "temperature"),
        ("completion", dict(temperature=-0.1), "temperature"),
        ("completion", dict(top_p=-0.1), "top_p"),
        ("completion", dict(n=0), "n"),
        ("completion", dict(seed=2**64), "seed"),
        ("completion", dict(stop=["a"] * 17), "stop"),
        ("completion", dict(stop=["a" * 257]), "stop"),
        ("completion", dict(stop=7), "stop"),
        ("completion", dict(stream="yes"), "stream"),
        ("completion", dict(stream_options=7), "stream_options"),
        (
            "completion",
            dict(stream=True, stream_options={"x": 1}),
            "stream_options.x",
        ),
    ],
)
def test_unsupported_parameters_are_named(kind, change, param):
    with pytest.raises(ApiError) as refusal:
        parse(kind, (CHAT if kind == "chat" else TEXT) | change)
    error = refusal.value.body()["error"]
    assert (refusal.value.status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error" and param[:8] in error["message"]


def test_neutral_parameters_are_accepted():
    request = parse(
        "chat",
        CHAT
        | dict(
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            user="somebody",
            metadata={"a": "b"},
            stop=None,
            seed=None,
        ),
    )
    assert (request.max_tokens, request.n, request.stops) == (None, 1, ())
    assert request.top_logprobs is None and not request.stream
    assert request.sampling(7) == Sampling(1.0, seed=7)


def test_supported_parameters_are_read():
    asked = dict(prompt=["a", [1, 2]], max_tokens=3, temperature=0.5, top_p=0.9, n=2)
    more = dict(best_of=2, logprobs=0, stop="ab", seed=2**32 - 1, stream=True)
    request = parse(
        "completion", TEXT | asked | more | dict(stream_options={"include_usage": True})
    )
    assert request.prompts == ("a", (1, 2)) and request.max_tokens == 3
    assert request.sampling(7) == Sampling(0.5, top_p=0.9, seed=2**32 - 1)
    assert (request.n, request.top_logprobs, request.stops) == (2, 0, ("ab",))
    assert request.stream and request.usage
    assert parse("completion", TEXT).max_tokens == 16
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse("chat", CHAT | dict(messages=message(content=parts, name="me")))
    assert request.messages == ({"role": "user", "content": "ab", "name": "me"},)
