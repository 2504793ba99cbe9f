"""Test request fields that clients send, with the unusual values that they have.

The model's text is a table: "x" continues with "yz" and its end of turn, and "p" with
"qpqp..." forever. At temperature 2, about 7 % of the tokens of the latter differ.
"""

import json
import select
import socket
from dataclasses import replace

import pytest

from stree_jax.cli import template_limits
from stree_jax.server import connection
from stree_jax.server.app import make_app
from tests.support.table_server import (
    LOOP,
    ask,
    listening,
    over_socket,
    spell_of,
    started,
    table_service,
    write_table,
)

GREEDY = dict(prompt="x", temperature=0)
DRAWN = dict(prompt="p", temperature=2, max_tokens=48)
CHAT = dict(messages=[{"role": "user", "content": "hi"}], temperature=0)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = write_table(tmp_path_factory.mktemp("server") / "model")
    with started(table_service(path)) as service:
        yield service


def answer_to(service, body, path="/v1/completions"):
    status, _, answer = ask(service, path, body)
    assert status == 200, answer
    return answer


def text_of(service, body):
    return answer_to(service, body)["choices"][0]["text"]


def chat_text(service, **fields):
    answer = answer_to(service, CHAT | fields, "/v1/chat/completions")
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        dict(seed=-1),
        dict(seed=2**63),
        dict(seed=7.0),
        dict(stop=""),
        dict(stop=[""]),
        dict(stop=None),
        dict(stop=[]),
        dict(stop=[str(i) for i in range(10)]),
        dict(max_tokens=-1),
        dict(max_tokens=16.0),
        dict(n=1.0),
        dict(best_of=1),
        dict(top_p=0),
        dict(top_k=-1, min_p=0),
        dict(top_k=0, min_p=1),
        dict(top_k=10**12),
        dict(repetition_penalty=1.0),
        dict(repeat_penalty=1),
        dict(presence_penalty=0.0, frequency_penalty=-0.0),
        dict(logit_bias={}),
        dict(logit_bias={"5": 0}),
        dict(logit_bias=[]),
        dict(dry_multiplier=0.0, dry_base=1.75, xtc_probability=0, xtc_threshold=0.1),
        dict(top_n_sigma=-1.0, n_keep=0, n_discard=0, t_max_predict_ms=-1, lora=[]),
        dict(mirostat=0, mirostat_tau=5.0, dynatemp_range=0, typical_p=1.0, id_slot=-1),
        dict(response_format={"type": "text", "json_schema": None}),
        dict(logprobs=False),
        dict(logprobs=None),
        dict(echo=False, suffix=""),
        dict(stream=0),
        dict(stream_options=None),
        dict(stream_options={"include_usage": True}),
        dict(max_tokens=1000),
        dict(max_tokens=2, max_completion_tokens=9),
        dict(store=True, prediction={"type": "content", "content": "x"}),
        dict(user="me", metadata={}, cache_prompt=True, request_id="1"),
        dict(min_tokens=0, ignore_eos=False, skip_special_tokens=True),
        dict(model="table"),
        dict(model=None),
        dict(temperature=1e-44),
    ],
)
def test_values_that_other_servers_accept(service, fields):
    """These fields do not change the greedy text."""
    assert text_of(service, GREEDY | fields) == "yz"


@pytest.mark.parametrize(
    "fields",
    [
        dict(tools=[]),
        dict(tools=None, tool_choice=None),
        dict(tools=[], tool_choice="auto", parallel_tool_calls=True),
        dict(functions=[], function_call="auto"),
        dict(verbosity="low", best_of=1),
        dict(tool_choice="auto", reasoning_effort="low"),
        dict(logprobs=0, top_logprobs=0),
        dict(logprobs=False),
        dict(top_logprobs=0),
        dict(response_format={"type": "text"}),
        dict(max_completion_tokens=-1),
        dict(add_generation_prompt=True, continue_final_message=False),
        dict(chat_template_kwargs={"enable_thinking": False}),
    ],
)
def test_chat_values_that_other_servers_accept(service, fields):
    assert chat_text(service, **fields) == "xyz"


@pytest.mark.parametrize(
    "fields",
    [
        dict(seed=2**64),
        dict(seed=1.5),
        dict(seed="7"),
        dict(seed=True),
        dict(n=0),
        dict(n=2.5),
        dict(max_tokens=-2),
        dict(temperature=-1),
        dict(temperature=2.5),
        dict(top_p=1.1),
        dict(top_k=-2),
        dict(min_p=1.5),
        dict(best_of=2),
        dict(presence_penalty=2.5),
        dict(frequency_penalty="1"),
        dict(repetition_penalty=0),
        dict(logit_bias={"5": 101}),
        dict(logit_bias={"y": 1}),
        dict(logit_bias={"99999": 1}),
        dict(logit_bias=[["y", 1]]),
        dict(logit_bias=[[5, True]]),
        dict(logit_bias=7),
        dict(logprobs=True),
        dict(echo="yes"),
        dict(suffix="x"),
        dict(min_tokens=-1),
        dict(min_tokens=17),
        dict(stop_token_ids=[99999]),
        dict(stop_token_ids=[-1]),
        dict(stop_token_ids=["y"]),
        dict(stop_token_ids=list(range(17))),
        dict(response_format=7),
        dict(stream="yes"),
        dict(stop=[7]),
        dict(nonsense=1),
        dict(mirostat=2),
        dict(dry_multiplier=0.8),
        dict(grammar="root ::= x"),
        dict(repeat_last_n=64),
    ],
)
def test_refused_fields_are_named(service, fields):
    (name,) = fields
    status, _, answer = ask(service, "/v1/completions", GREEDY | fields)
    assert status == 400 and answer["error"]["param"] == name
    assert name in answer["error"]["message"]


def test_max_tokens_zero_gives_an_empty_text(service):
    """As with OpenAI and llama.cpp. Clients count the tokens of a prompt this way."""
    answer = answer_to(service, GREEDY | dict(max_tokens=0, n=2))
    assert [c["text"] for c in answer["choices"]] == ["", ""]
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    usage = dict(prompt_tokens=1, completion_tokens=0, total_tokens=1)
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    body = GREEDY | dict(max_tokens=0, stream=True)
    assert '"finish_reason":"length"' in ask(service, "/v1/completions", body)[2]


def test_an_unlimited_text_fills_the_context(service):
    endless = dict(prompt="p", temperature=0, max_tokens=-1)
    answer = answer_to(service, endless)
    # The context is 64, and the prompt is 1
    assert answer["usage"]["completion_tokens"] == 63
    assert answer["choices"][0]["text"] == LOOP[1:]


def test_ignore_eos_continues_after_stop_tokens(service):
    answer = answer_to(service, GREEDY | dict(ignore_eos=True, max_tokens=9))
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["text"].startswith("yz")


def test_strict_filters_give_the_greedy_text(service):
    """At temperature 2, where unfiltered text differs from the table."""
    assert text_of(service, DRAWN | dict(seed=3)) != LOOP[1:49]
    for only in (dict(top_k=1), dict(top_k=1.0), dict(min_p=1), dict(top_p=0)):
        assert text_of(service, DRAWN | dict(seed=3) | only) == LOOP[1:49]
    assert text_of(service, DRAWN | dict(seed=3, top_k=0)) != LOOP[1:49]


def test_repetition_penalty_divides_logits_of_earlier_tokens(service):
    """After s, r has the logit sqrt(V) and z 0.9 sqrt(V). A penalty of 1.2 reduces the
    logit of r, which is in the prompt, to 0.83 sqrt(V). After z the text ends."""
    body = dict(prompt="r", temperature=0, max_tokens=6)
    assert text_of(service, body) == "srsrsr"
    for name in ("repetition_penalty", "repeat_penalty"):
        assert text_of(service, body | {name: 1.2}) == "sz"
        assert text_of(service, body | {name: 1.1}) == "srsrsr"
    drawn = dict(temperature=1, top_k=1, seed=5, repetition_penalty=1.2)
    assert text_of(service, body | drawn) == "sz"
    assert text_of(service, body) == "srsrsr"  # later requests have no penalty


def id_of(service, letter):
    return service.reader.tokenizer.token_to_id(letter)


def test_penalties_count_the_tokens_of_the_output(service):
    """The logits of r and z after s differ by 0.1 sqrt(V), which is between 1.5 and 2.
    The r of the prompt does not count."""
    assert 1.5 < 0.1 * service.model.config.num_tokens**0.5 < 2
    body = dict(prompt="r", temperature=0, max_tokens=6)
    assert text_of(service, body | dict(presence_penalty=1.5)) == "srsrsr"
    assert text_of(service, body | dict(presence_penalty=2)) == "srsz"
    assert text_of(service, body | dict(frequency_penalty=1)) == "srsrsz"
    both = dict(presence_penalty=1, frequency_penalty=1)
    assert text_of(service, body | both) == "srsz"
    drawn = dict(temperature=1, top_k=1, seed=5, frequency_penalty=1)
    assert text_of(service, body | drawn) == "srsrsz"
    assert text_of(service, body) == "srsrsr"


def test_a_bias_is_added_to_logits(service):
    body = dict(prompt="r", temperature=0, max_tokens=6)
    z, r = id_of(service, "z"), id_of(service, "r")
    assert text_of(service, body | dict(logit_bias={str(z): 2})) == "sz"
    assert text_of(service, body | dict(logit_bias={str(z): 1.5})) == "srsrsr"
    assert text_of(service, body | dict(logit_bias=[[r, False]])) == "sz"
    only = dict(logit_bias={str(r): 100}, max_tokens=3)
    assert text_of(service, body | only) == "rrr"
    both = dict(logit_bias={str(z): 1}, presence_penalty=1)
    assert text_of(service, body | both) == "srsz"


def test_stop_tokens_of_a_request(service):
    """They belong to the text, as in vLLM; the model's own still end it."""
    y, p = id_of(service, "y"), id_of(service, "p")
    assert text_of(service, GREEDY | dict(stop_token_ids=[y, p])) == "y"
    assert text_of(service, GREEDY | dict(stop_token_ids=[p])) == "yz"
    body = dict(prompt="p", temperature=0, max_tokens=9, ignore_eos=True)
    assert text_of(service, body | dict(stop_token_ids=[p])) == LOOP[1:3]
    late = dict(stop_token_ids=[p], min_tokens=3)
    assert text_of(service, body | late) != LOOP[1:3]


def test_min_tokens_delay_every_end(service):
    for fields in ({}, dict(stop="z"), dict(stop_token_ids=[id_of(service, "z")])):
        answer = answer_to(service, GREEDY | fields | dict(min_tokens=5))
        assert answer["usage"]["completion_tokens"] >= 5
    assert text_of(service, GREEDY | dict(stop="z", min_tokens=1)) == "y"
    loop = dict(prompt="p", temperature=0, max_tokens=9, stop="p")
    assert text_of(service, loop) == "q"
    assert text_of(service, loop | dict(min_tokens=4)) == "qpqpq"


def test_echo_begins_the_text_with_the_prompt(service):
    assert text_of(service, GREEDY | dict(echo=True)) == "xyz"
    assert text_of(service, GREEDY | dict(echo=True, max_tokens=0)) == "x"
    ids = [id_of(service, letter) for letter in "px"]
    answer = answer_to(service, GREEDY | dict(prompt=[ids, ids], echo=True, n=2))
    assert [choice["text"] for choice in answer["choices"]] == ["pxyz"] * 4
    stream = ask(service, "/v1/completions", GREEDY | dict(echo=True, stream=True))[2]
    assert '"text":"x"' in stream
    body = GREEDY | dict(echo=True, logprobs=1)
    status, _, answer = ask(service, "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "echo"


def test_every_bit_of_the_seed_matters(service):
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**63, -2, -(2**63) + 1]

    def texts_of(seed):
        choices = answer_to(service, DRAWN | dict(seed=seed, n=3))["choices"]
        return tuple(choice["text"] for choice in choices)

    texts = [texts_of(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    assert [texts_of(seed) for seed in seeds[-3:]] == texts[-3:]
    assert texts_of(2**64 - 2) == texts_of(-2)


def test_seed_minus_one_is_random(service):
    texts = {text_of(service, DRAWN | dict(seed=-1)) for _ in range(4)}
    assert len(texts) > 1


# Connections


def request(body, *headers, version="1.1", method="POST"):
    """Returns a request as bytes. The connection closes after it."""
    lines = [f"{method} /v1/completions HTTP/{version}", "Host: x", *headers]
    lines += ["Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


BODY = json.dumps(GREEDY).encode()
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
)
FORM = "Content-Type: application/x-www-form-urlencoded"  # curl -d without -H
SOCKETS = [
    (request(BODY), 200, "yz"),
    (request(BODY, version="1.0"), 200, "yz"),
    (request(BODY, FORM), 200, "yz"),
    (CHUNKED, 200, "yz"),
    (request(b"\xef\xbb\xbf" + BODY), 200, "yz"),
    (request(BODY.decode().encode("utf-16")), 200, "yz"),
    (request(b"\x1f\x8b...", "Content-Encoding: gzip"), 415, "Content-Encoding gzip"),
    (request(b'{"prompt":"x","prompt":"y"}'), 400, "'prompt' occurs more than once"),
    (request(b'{"prompt":"x","temperature":NaN}'), 400, "NaN is not JSON"),
    (request(b'{"prompt":"x","temperature":1e999}'), 400, "temperature"),
    (request(b'{"prompt":"x","seed":' + b"9" * 999 + b"}"), 400, "400 digits"),
    (request(b"[" * 60000), 400, "JSON"),
    (request(b'{"model":"\\ud800","prompt":"x"}'), 404, "does not exist"),
    (request(b'{"\\ud800":1}'), 400, "Unrecognized"),
    (request(BODY, "Content-Length: 3"), 400, "Invalid HTTP"),
    (request(BODY, method="HEAD"), 405, ""),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 300000, 400, "Invalid HTTP"),
    # Https:// sent to an http port
    (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "Invalid HTTP"),
]


def test_raw_requests_of_many_clients(service):
    with listening(make_app(service)) as port:
        for data, status, word in SOCKETS:
            head, _, body = over_socket(port, data).partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status, (data[:80], head)
            assert word in body.decode(), (data[:80], body)
            if body:
                assert "error" in json.loads(body) or status == 200


def test_slow_requests_time_out(service, monkeypatch):
    """A client that sends a byte now and then cannot keep a connection open forever."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with listening(make_app(service)) as port:
        assert over_socket(port, b"") == b""
        assert b" 408 " in over_socket(port, b"POST /v1/completions HT")
        kept = request(BODY).replace(b"Connection: close\r\n", b"")
        assert b" 200 OK" in over_socket(port, kept + b"GET /hea")
        refused = request(BODY, method="PUT").replace(b"Length: ", b"Length: 1")
        assert b" 405 " in over_socket(port, refused)  # its body never ends


def test_the_server_survives_clients_that_disconnect(service):
    patient = replace(service)
    with listening(make_app(patient)) as port:
        for data in (BODY[:5], request(BODY)[:-3], request(BODY)):
            with socket.create_connection(("127.0.0.1", port), 10) as sock:
                sock.sendall(data)
        assert b'"text":"yz"' in over_socket(port, request(BODY))


def test_an_endless_template_does_not_block_other_requests(
    service, tmp_path, monkeypatch
):
    loop = "{% for i in range(99999) %}BODY{% endfor %}"
    endless = write_table(tmp_path / "model", loop.replace("BODY", loop))
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 4.0)
    app = make_app(replace(service, spell=spell_of(endless)))
    chat = json.dumps(CHAT).encode()
    asked = request(chat).replace(b"/completions", b"/chat/completions")
    with listening(app) as port, socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(asked)
        assert b'"text":"yz"' in over_socket(port, request(BODY))
        assert not select.select([sock], [], [], 0)[0]  # it has no answer yet
        sock.settimeout(30)
        assert b"more than 4 seconds" in sock.recv(65536)
