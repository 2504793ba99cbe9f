"""Test what is found out about chat templates, with short ones of each kind."""

import json

import pytest

from stree_jax.cli.chat import render
from stree_jax.cli.template_use import render_checked
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.protocol import parse
from stree_jax.server.template_format import chat_format
from tests.support.answer_server import HERMES
from tests.support.table_server import CHATML

TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
# Messages whose calls are written by CALL, which has the variables `c` and `f`.
MESSAGES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
    "{% endfor %}"
)
QWEN = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>"
)
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TEXT = '{"name": "{{ f.name }}", "arguments": ' + "{{ '' + f.arguments }}}"
GRANITE = TOOLS + "{% if tools %}Write <|tool_call|> and a list.{% endif %}" + CHATML
LFM2 = "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}" + CHATML
LLAMA = (
    '<|start_header_id|>{"name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}"
)
ONE = "{% if loop.first %}CALL{% endif %}"
REASONS = dict(reasoning=("<think>", "</think>"))
NINE = "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"


def template_of(call):
    return TOOLS + MESSAGES.replace("CALL", call)


def form_of(template):
    def rendered(messages, tools):
        return render(template, messages, {}, False, tools=tools)

    return chat_format(template, rendered)


@pytest.mark.parametrize(
    ("template", "opening", "more"),
    [
        (HERMES, "<tool_call>", REASONS),
        (template_of(QWEN), "<tool_call>", {}),
        (template_of(f"<tool_call>{JSON}</tool_call>"), "<tool_call>", {}),
        (
            template_of(f"<tool_call>{TEXT}</tool_call>"),
            "<tool_call>",
            dict(text_arguments=True),
        ),
        (
            template_of(f"{{% if m.content is none %}}<TOOLCALL>{JSON}{{% endif %}}"),
            "<TOOLCALL>",
            dict(null_content=True),
        ),
        (
            template_of(ONE.replace("CALL", f"<tool_call>{JSON}</tool_call>")),
            "<tool_call>",
            dict(several=False),
        ),
        (template_of(f"{NINE}[TOOL_CALLS][{JSON}]"), "[TOOL_CALLS]", {}),
        (template_of(LLAMA), "{", {}),
        (HERMES.replace("tools", "xml_tools"), "<tool_call>", REASONS),
        (GRANITE, "<|tool_call|>", dict(drops_calls=True)),
        (LFM2, "<|tool_call_start|>", dict(drops_calls=True)),
    ],
)
def test_formats_of_templates(template, opening, more):
    form = form_of(template)
    assert form.tools and form.reads_calls and form.calls.opening == opening
    plain = ChatFormat(tools=True, calls=form.calls)
    if form.drops_calls:
        more = more | dict(several=form.several)
    assert form == ChatFormat(**vars(plain) | more)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, ChatFormat()),
        ("{{ messages[9].content }}", ChatFormat()),
        (CHATML + "</think>", ChatFormat(reasoning=("<think>", "</think>"))),
        (template_of("{{ f.name }}"), ChatFormat(tools=True)),
        (TOOLS + CHATML, ChatFormat(tools=True)),
        (
            TOOLS + CHATML + "<|channel|><|message|><|start|>",
            ChatFormat(tools=True, channels=True),
        ),
    ],
)
def test_other_templates(template, form):
    found = form_of(template)
    assert ChatFormat(**vars(found) | dict(several=True)) == form


USER = {"role": "user", "content": "hi"}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
]
ASKED = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULTS = [
    {"role": "tool", "tool_call_id": "a", "content": "one"},
    {"role": "tool", "tool_call_id": "b", "content": "two"},
]
BODY = dict(messages=[USER, ASKED, *RESULTS])


def rendered(template, messages=BODY["messages"]):
    request, form = parse("chat", dict(messages=messages)), form_of(template)
    return render_checked(
        template, request.messages, {}, begins=False, prepared=form.prepared
    )


def test_arguments_are_objects_or_texts():
    expected = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    for call in (JSON, TEXT):
        text = rendered(template_of(f"<tool_call>{call}</tool_call>"))
        assert expected in text and "None" not in text
        assert text.endswith("<tool>one<tool>two")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            GRANITE,
            '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, '
            '{"name": "g", "arguments": {}}]',
        ),
        (LFM2, "<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>"),
    ],
)
def test_calls_that_a_template_leaves_out_are_written(template, text):
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in rendered(template)


@pytest.mark.parametrize("template", [GRANITE, LFM2])
def test_malformed_arguments_are_written(template):
    for arguments in ("{oops", "[1]"):
        function = {"name": "f", "arguments": arguments}
        asked = ASKED | dict(tool_calls=[CALLS[0] | {"function": function}])
        assert arguments in rendered(template, [USER, asked, RESULTS[0]])


def test_dropped_calls_and_results_are_refused():
    """Without a known format, they cannot be written into the content."""
    only_names = template_of("{{ f.name }}")
    with pytest.raises(ValueError, match=r"messages.\[1\].tool_calls.\[0\]"):
        rendered(only_names)
    one = template_of(ONE.replace("CALL", f"<tool_call>{JSON}</tool_call>"))
    with pytest.raises(ValueError, match=r"messages.\[1\].tool_calls.\[1\]"):
        rendered(one)
    no_results = one.replace("m.content or ''", "m.content if m.role != 'tool' else 1")
    with pytest.raises(ValueError, match=r"messages.\[2\].content"):
        rendered(no_results, [USER, ASKED | dict(tool_calls=CALLS[:1]), RESULTS[0]])


def test_the_thoughts_of_channels():
    form = ChatFormat(tools=True, channels=True)
    asked = dict(role="assistant", content="", reasoning_content="why")
    asked |= dict(tool_calls=[json.loads(json.dumps(CALLS[0]))])
    (found,) = form.prepared([asked])
    assert found["thinking"] == "why"
