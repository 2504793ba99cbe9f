"""Test `return_origins`: an answer lists its tokens with what proposed them."""

import json
import re

import pytest

from stree_jax.speculation.draft import ORIGINS
from tests.server.served import FINE, ask
from tests.server.tool_requests import BODY, PATH, PIECES, THOUGHTS, USER, chunks_of
from tests.support.answer_server import answer_service, write_answer
from tests.support.table_server import ask as asked
from tests.support.table_server import started

COMPLETIONS = "/v1/completions"


def streamed(service, path, body, send=ask):
    """Returns the origins and the chunks of a streamed answer."""
    text = send(service, path, body | dict(stream=True))[2]
    chunks = [json.loads(part[6:]) for part in text.split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return sum((c.get("origins", []) for c in choices), []), choices, chunks[-1]


def joined(origins):
    return "".join(text for text, _ in origins)


@pytest.mark.parametrize("which", [0, 3])
def test_an_answer_lists_its_tokens(service, prompts, which):
    """Whole and streamed: joined, they are the text; the counts are the engine's."""
    body = dict(prompt=prompts[which], max_tokens=60, temperature=0, ignore_eos=True)
    body |= dict(return_origins=True)
    status, _, answer = ask(service, COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert status == 200 and joined(choice["origins"]) == choice["text"]
    names = [origin for _, origin in choice["origins"]]
    assert len(names) == answer["usage"]["completion_tokens"] == 60
    counts = service.engine.counts
    assert [names.count(name) for name in ORIGINS] == counts.by_origin.tolist()
    assert 0 < names.count("lookup") < 60 > names.count("target")
    times = answer["timings"]
    assert times["target_calls"] == counts.calls
    assert times["acceptance_length"] == 60 / counts.calls > 1
    again, choices, last = streamed(service, COMPLETIONS, body)
    assert joined(again) == "".join(c["text"] for c in choices) == choice["text"]
    assert len(again) == 60 == last["timings"]["predicted_n"]


def test_a_stop_string_is_cut_out_of_the_tokens(service):
    body = FINE | dict(max_tokens=60, return_origins=True)
    (whole,) = ask(service, COMPLETIONS, body)[2]["choices"]
    text = whole["text"]
    stop = re.search("[a-z]{3}", text)[0]  # across tokens, of up to two letters
    for path in (body, body | dict(logprobs=2)):
        (choice,) = ask(service, COMPLETIONS, path | dict(stop=stop))[2]["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert joined(choice["origins"]) == choice["text"]
        origins, choices, _ = streamed(service, COMPLETIONS, path | dict(stop=stop))
        assert joined(origins) == "".join(c["text"] for c in choices) == choice["text"]


def test_only_requests_that_want_origins_get_them(service):
    plain = ask(service, COMPLETIONS, FINE)[2]["choices"][0]
    assert "origins" not in plain
    assert not streamed(service, COMPLETIONS, FINE)[0]
    off = ask(service, COMPLETIONS, FINE | dict(return_origins=False))[2]
    assert off["choices"][0] == plain
    status, _, answer = ask(service, COMPLETIONS, FINE | dict(return_origins="yes"))
    assert status == 400 and answer["error"]["param"] == "return_origins"


def test_tokens_of_calls_and_reasoning_are_listed(tmp_path):
    """They are the generated text, with the marks that the message leaves out."""
    path = write_answer(tmp_path / "calls", PIECES)
    body = BODY | dict(return_origins=True)
    with started(answer_service(path)) as service:
        (choice,) = asked(service, PATH, body)[2]["choices"]
        assert choice["message"]["content"] == "I look."
        assert [text for text, _ in choice["origins"]] == [*PIECES, ""]
        assert streamed(service, PATH, body, asked)[0] == choice["origins"]
    thoughts = write_answer(tmp_path / "thoughts", THOUGHTS)
    body = dict(messages=[USER], temperature=0, return_origins=True)
    body |= dict(chat_template_kwargs={"enable_thinking": True}, stream=True)
    with started(answer_service(thoughts)) as service:
        chunks = chunks_of(asked(service, PATH, body)[2])
        lists = [c["choices"][0].get("origins", []) for c in chunks]
        assert [text for part in lists for text, _ in part] == [*THOUGHTS, ""]


def test_characters_of_several_tokens_belong_to_the_last(tmp_path):
    """A character whose bytes are three tokens: the first two complete nothing."""
    path = write_answer(tmp_path / "bytes", [b"\xe2", b"\x82", b"\xac!"])
    with started(answer_service(path)) as service:
        body = dict(messages=[USER], temperature=0, return_origins=True)
        (choice,) = asked(service, PATH, body)[2]["choices"]
        assert choice["message"]["content"] == "\u20ac!"
        texts = [text for text, _ in choice["origins"]]
        assert texts == ["", "", "\u20ac!", ""]
