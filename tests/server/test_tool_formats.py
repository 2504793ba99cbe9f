"""Test that tool calls and reasoning are found in texts, whole and growing."""

import json

import pytest

from stree_jax.server.calls import Call
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.formats import FORMATS
from stree_jax.server.split import Parts, split
from tests.server.tool_texts import CHANNELS, GPT_OSS, QWEN, SCHEMAS, TEXTS, forms_of

WEATHER = ("get_weather", {"city": "Zürich", "days": 3})
OPENINGS = [f"{i}-{opening}" for i, (opening, _) in enumerate(TEXTS)]
THINKING = ChatFormat(reasoning=("<think>", "</think>"))


def calls_in(parts):
    return [(call.name, json.loads(call.arguments)) for call in parts.calls]


def grown(text, form, schemas, **options):
    """Returns the parts of a text, and checks that each prefix adds to the one
    before."""
    before = Parts()
    whole = split(text, form, schemas, final=True, **options)
    for end in range(len(text) + 1):
        found = split(text[:end], form, schemas, final=False, **options)
        for longer, shorter in ((found, before), (whole, found)):
            assert longer.reasoning.startswith(shorter.reasoning)
            assert longer.content.startswith(shorter.content)
            assert len(longer.calls) >= len(shorter.calls)
            pairs = zip(longer.calls, shorter.calls, strict=False)
            for call, earlier in pairs:
                assert call.name == earlier.name
                assert call.arguments.startswith(earlier.arguments)
        before = found
    assert all(call.arguments.encode() for call in whole.calls)
    return whole


@pytest.mark.parametrize(("opening", "text"), TEXTS, ids=OPENINGS)
def test_calls_are_read_back(opening, text):
    """One of the formats with this opening reads the calls, also after reasoning."""
    expected = [WEATHER] + ([("now", {})] if "now" in text else [])
    found = []
    for form in forms_of(opening):
        for before in ("", "<think>\nWhy?\n</think>\n\n"):
            parts = grown(before + text, form, SCHEMAS)
            assert parts.reasoning == ("Why?" if before else "")
            if parts.calls and not parts.content:
                found.append(calls_in(parts))
    assert expected in found


@pytest.mark.parametrize(("opening", "text"), TEXTS, ids=OPENINGS)
def test_text_before_calls_is_content(opening, text):
    if opening == "{":
        return  # a bare object is a call only at the beginning of an answer
    contents = [
        grown(f"I look it up.\n\n{text}", form, SCHEMAS) for form in forms_of(opening)
    ]
    assert any(p.content == "I look it up." and p.calls for p in contents)


@pytest.mark.parametrize(("opening", "text"), TEXTS, ids=OPENINGS)
def test_without_tools_calls_are_content(opening, text):
    for form in forms_of(opening):
        assert grown(text, form, None) == Parts(content=text)


def test_every_format_has_a_text():
    assert {f.opening for f in FORMATS} == {opening for opening, _ in TEXTS}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=city>\n3\n</parameter>", {"city": "3"}),
        ("<parameter=city>\na\n\nb\n\n</parameter>", {"city": "a\n\nb\n"}),
        ('<parameter=city>{"a": "</p>"}</parameter>', {"city": '{"a": "</p>"}'}),
        ("<parameter=days>\nmany\n</parameter>", {"days": "many"}),
        ('<parameter=at>\n{"lat": 1.5}\n</parameter>', {"at": {"lat": 1.5}}),
        ("<parameter=unit>\nnull\n</parameter>", {"unit": None}),
        ("<parameter=unit>\n7\n</parameter>", {"unit": "7"}),
        ("<parameter=other>\nTrue\n</parameter>", {"other": True}),
        ("<parameter=other>\n[1]\n</parameter>", {"other": [1]}),
        ("<parameter=at>{'lat': None}</parameter>", {"at": {"lat": None}}),
        ('<parameter=other>\n"\\ud800"\n</parameter>', {"other": "\ud800"}),
        ("<parameter=other>\nNaN\n</parameter>", {"other": "NaN"}),
        ("", {}),
    ],
)
def test_the_schema_types_the_values_of_tags(text, arguments):
    text = f"<tool_call>\n<function=get_weather>\n{text}\n</function>\n</tool_call>"
    parts = grown(text, forms_of("<tool_call>")[0], SCHEMAS)
    assert calls_in(parts) == [("get_weather", arguments)]


@pytest.mark.parametrize(
    ("opening", "text", "arguments"),
    [
        (
            "<|tool_call_start|>",
            "[now(a='x\ny', b=[1, true], c={\"d\": null}, e=-1.5)]<|tool_call_end|>",
            {"a": "x\ny", "b": [1, True], "c": {"d": None}, "e": -1.5},
        ),
        (
            "<|tool_call>",
            'call:now{a:<|"|>x:{y}<|"|>,b:{c:[None,true]}}<tool_call|>',
            {"a": "x:{y}", "b": {"c": [None, True]}},
        ),
        (
            '<function name="',
            'now"><param name="a"><![CDATA[<x>]]></param><param name="b">2</param>'
            "</function>",
            {"a": "<x>", "b": 2},
        ),
    ],
)
def test_values_of_other_formats(opening, text, arguments):
    (form,) = forms_of(opening)
    assert calls_in(grown(opening + text, form, SCHEMAS)) == [("now", arguments)]


@pytest.mark.parametrize(
    "schema",
    [7, {"type": [{}, "integer"]}, {"type": {}}, {"anyOf": 7}, {"enum": [{}]}, {}],
)
def test_malformed_schemas(schema):
    text = "<tool_call><function=f><parameter=a>3</parameter></function></tool_call>"
    parts = grown(text, forms_of("<tool_call>")[0], {"f": {"a": schema}})
    assert calls_in(parts) == [("f", {"a": 3})]


def test_arguments_grow_while_they_are_written():
    hermes = forms_of("<tool_call>")[2]
    text = '<tool_call>\n{"name": "now", "arguments": {"a": "long'
    assert split(text, hermes, SCHEMAS, final=False).calls == (
        Call("now", '{"a": "long'),
    )
    tagged = forms_of("<tool_call>")[0]
    text = '<tool_call><function=get_weather><parameter=city>\nA "\n</para'
    assert split(text, tagged, SCHEMAS, final=False).calls == (
        Call("get_weather", '{"city": "A \\"'),
    )


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"arguments": {"a": 1}, "name": "now"}', [("now", {"a": 1})]),
        ('{"name": "now"}', [("now", {})]),
        ('{"name": "now", "arguments": null}', [("now", {})]),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
        ('{"name": "now", "arguments": {"a": "x\ny\t}"}}', [("now", {"a": "x\ny\t}"})]),
        ('{"arguments": {"a": "\\ud800"}, "name": "now"}', [("now", {"a": "\ud800"})]),
        ('{"name": "unknown", "arguments": {}}', [("unknown", {})]),
    ],
)
def test_spellings_of_json_calls(text, calls):
    parts = grown(
        f"<tool_call>\n{text}\n</tool_call>", forms_of("<tool_call>")[2], SCHEMAS
    )
    assert (calls_in(parts), parts.content) == (calls, "")


@pytest.mark.parametrize(
    ("opening", "text"),
    [
        ("<tool_call>", "Write <tool_call> before it."),
        ("<tool_call>", "<tool_call>{not json}</tool_call>"),
        ("<tool_call>", '<tool_call>{"name": "now", '),
        ("<tool_call>", '<tool_call>{"nom": "now"}</tool_call>'),
        ("<tool_call>", "<tool_call>[1, 2]</tool_call>"),
        ("<tool_call>", '<tool_call>{"name": "a b"}</tool_call>'),
        ("<tool_call>", "a <tool"),
        ("<tool_call>", "<tool_call> is <b>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[f()(a=1)]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>f(a=<|tool_call_end|>"),
        ("<|tool_call_start|>", f"<|tool_call_start|>{'(' * 999}<|tool_call_end|>"),
        ("<|tool_call>", '<|tool_call>call:f{a:<|"|>}<tool_call|>'),
        ("{", '{"answer": 42}'),
        ("{", '{"name": "somebody", "parameters": {}}'),
        ("{", 'See {"name": "now", "parameters": {}}'),
    ],
)
def test_other_texts_are_content(opening, text):
    for form in forms_of(opening):
        assert grown(text, form, SCHEMAS) == Parts(content=text)


def test_json_answers_are_not_held_back():
    (llama,) = forms_of("{")
    text = '{"answer": "lo'
    assert split(text, llama, SCHEMAS, final=False).content == text


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\na\n</think>\n\nb", False, Parts("a", "b")),
        ("a\n</think>\n\nb", True, Parts("a", "b")),
        ("<think>a", False, Parts("a")),
        ("a", True, Parts("a")),
        ("a", False, Parts("", "a")),
        ("<thin", False, Parts("", "<thin")),
        ("a <think>b</think>", False, Parts("", "a <think>b</think>")),
        ("<think></think>b", False, Parts("", "b")),
    ],
)
def test_reasoning(text, opened, parts):
    assert grown(text, THINKING, None, opened=opened) == parts


def test_channels():
    parts = grown(CHANNELS, GPT_OSS, SCHEMAS)
    assert parts.reasoning == "Look it up." and calls_in(parts) == [WEATHER]
    final = "<|channel|>final<|message|>Rain.<|return|>"
    text = CHANNELS.partition("<|start|>")[0] + "<|start|>assistant" + final
    assert grown(text, GPT_OSS, None) == Parts("Look it up.", "Rain.")
    other = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert calls_in(grown(other, GPT_OSS, SCHEMAS)) == [("now", {"a": 1})]
    assert grown("plain", GPT_OSS, None) == Parts(content="plain")


@pytest.mark.parametrize("more", ["", "\nThat is all.", "\n</tool"])
def test_text_behind_a_call_that_is_not_closed(more):
    text = QWEN.removesuffix("\n</tool_call>") + more
    parts = grown(text, forms_of("<tool_call>")[0], SCHEMAS)
    assert calls_in(parts) == [WEATHER]
    assert parts.content == ("That is all." if "all" in more else "")


def test_a_call_before_other_text():
    parts = grown(f"a\n{QWEN}\nb", forms_of("<tool_call>")[0], SCHEMAS)
    assert parts.content == "a\nb" and calls_in(parts) == [WEATHER]
