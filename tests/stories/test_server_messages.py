"""Test messages that a chat template drops, and chat templates that do not end.

The expected text of a template is written by hand. An error names the message and its
role.
"""

import json
import time

import pytest

from stree_jax.checkpoints.load import load
from stree_jax.cli import template_limits
from stree_jax.cli.chat import render
from stree_jax.cli.main import main
from stree_jax.cli.template_use import render_checked
from stree_jax.server.errors import ApiError
from stree_jax.server.protocol import Turn, parse
from tests.support.table_server import CHATML, spell_of, write_table

# Handles two roles, as many published templates do, and no names.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# Takes a system message only as the first one, strips contents, and refuses other
# roles.
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set start = 1 %}"
    "<<SYS>>{{ messages[0].content | trim }}<</SYS>>{% else %}{% set start = 0 %}"
    "{% endif %}{% for m in messages[start:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.content | trim }}]{% endfor %}"
)
LAST_SYSTEM = (
    "{% set s = namespace(x='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set s.x = m.content %}{% endif %}{% endfor %}{{ s.x }}"
    "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
)
REASONS = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)
NAMES = (
    "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}\n{% endfor %}"
)
ESCAPES = (
    "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}"
)


def message(role, content, **fields):
    return {"role": role, "content": content} | fields


USER = message("user", "hi")


def rendered(template, *messages, **turn):
    return render_checked(template, messages, {"eos_token": "</s>"}, **turn)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (TWO_ROLES, [USER], "[hi]"),
        (TWO_ROLES, [USER, message("assistant", "yes"), USER], "[hi]yes</s>[hi]"),
        (TWO_ROLES, [message("system", ""), USER], "[hi]"),
        (
            LLAMA_2,
            [message("system", " be kind\n"), USER],
            "<<SYS>>be kind<</SYS>>[hi]",
        ),
        (LLAMA_2, [message("developer", "x"), USER], "<<SYS>>x<</SYS>>[hi]"),
        (
            REASONS,
            [USER, message("assistant", "b", reasoning_content="a"), USER],
            "hibhi",
        ),
        (NAMES, [message("user", "hi", name="me")], "user me: hi\n"),
        (TWO_ROLES, [message("user", "hi", name="me")], "[hi]"),
        (
            TWO_ROLES,
            [USER, message("assistant", "", reasoning="a"), USER],
            "[hi]</s>[hi]",
        ),
        (ESCAPES, [message("user", 'é"')], '"\\u00e9\\""'),
        (LAST_SYSTEM, [message("system", "a"), USER], "a[hi]"),
    ],
)
def test_texts_of_templates(template, messages, text):
    assert rendered(template, *messages) == text


@pytest.mark.parametrize(
    ("template", "messages", "word"),
    [
        (TWO_ROLES, [message("system", "be kind"), USER], r"\[0\].*'system'"),
        (TWO_ROLES, [USER, message("tool", "42")], r"\[1\].*'tool'"),
        (TWO_ROLES, [USER, message("function", "42", name="f")], r"\[1\].*'function'"),
        (TWO_ROLES, [message("bot", "hi"), USER], r"\[0\].*'bot'"),
        (TWO_ROLES, [message("User", "hi"), USER], r"\[0\].*'User'"),
        # The same text appears, but in another message.
        (TWO_ROLES, [message("system", "hi"), USER], r"\[0\].*'system'"),
        (
            LAST_SYSTEM,
            [message("system", "a"), message("system", "b"), USER],
            r"\[0\].*'system'",
        ),
        (LLAMA_2, [message("tool", "42")], "alternate"),
        ("hello", [USER], r"\[0\].*'user'"),
    ],
)
def test_messages_that_a_template_drops_are_refused(template, messages, word):
    with pytest.raises(ValueError, match=word):
        rendered(template, *messages)


def test_the_final_message_can_be_continued():
    begun = message("assistant", "Once upon ")
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon "
    assert rendered(CHATML, USER, begun, begins=False, continues=True) == text
    assert rendered(TWO_ROLES, USER, begun, begins=False, continues=True) == (
        "[hi]Once upon "
    )
    with pytest.raises(ValueError, match="continue_final_message"):
        rendered("{{ messages[-1].content | length }}", USER, continues=True)


def test_variables_of_a_template():
    template = "{{ messages[0].content }}{{ ' /think' if enable_thinking }}"
    assert rendered(template, USER) == "hi"
    on = {"enable_thinking": True}
    assert rendered(template, USER, variables=on) == "hi /think"
    body = dict(messages=[USER], chat_template_kwargs=on, add_generation_prompt=False)
    assert parse("chat", body).turn == Turn(False, False, on)
    for own in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ApiError, match="chat_template_kwargs"):
            parse("chat", body | dict(chat_template_kwargs={own: []}))
    with pytest.raises(ApiError, match="continue_final_message"):
        both = dict(add_generation_prompt=True, continue_final_message=True)
        parse("chat", body | both)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(role="user", content=None), "content"),
        (dict(content=7), "content"),
        (dict(content=None, refusal=7), "refusal"),
        (dict(audio={"id": "a"}), "audio"),
        (dict(function_call={"name": "f", "arguments": ""}), "function_call"),
        (dict(reasoning=7), "reasoning"),
        (dict(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "content"),
        (dict(content=[{"type": "text", "text": "a"}, {"type": "file"}]), "content"),
        (dict(content=None, tool_calls=[{"id": "1"}]), "tool_calls.[0].function"),
        (dict(content=[{"type": "text", "text": "a", "image": "b"}]), "content.image"),
        (dict(images=["x"]), "images"),
        (dict(prefix=True), "prefix"),
        (dict(tool_call_id="1"), "tool_call_id"),
        (dict(weight=0), "weight"),
        (dict(name=7), "name"),
        (dict(reasoning_content=["a"]), "reasoning_content"),
    ],
)
def test_unsupported_parts_of_a_message_are_refused(fields, param):
    with pytest.raises(ApiError) as refusal:
        parse("chat", dict(messages=[message("assistant", "x") | fields]))
    assert refusal.value.param == f"messages.[0].{param}"


def test_answers_are_accepted_as_messages():
    """With all fields of an answer's message, as official clients send it back."""
    answer = message("assistant", "yes", refusal=None, annotations=[], tool_calls=[])
    answer |= dict(function_call=None, audio=None, name=None, reasoning_content="")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse("chat", dict(messages=[message("user", parts), answer])).messages
    assert found == (message("user", "ab"), message("assistant", "yes"))


def test_empty_fields_of_a_message_are_accepted():
    """As web clients store chat messages, and as LiteLLM marks parts to cache."""
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    asked = message("user", [part], images=[], metadata={}, prefix=False, id="")
    found = parse("chat", dict(messages=[asked])).messages
    assert found == (message("user", "a"),)


def test_the_server_encodes_the_text_of_the_template(tmp_path):
    path = write_table(tmp_path / "model")
    ids = spell_of(path)([USER], Turn())
    tokenizer = load(path).tokenizer
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_refuses_a_dropped_system_message(tmp_path, capsys):
    path = write_table(tmp_path / "model", TWO_ROLES)
    asked = ["chat", "--model", str(path), "--drafter", "none", "--system", "be kind"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--system" in said and "'system'" in said


# Templates that do not end

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
)
DOUBLE = (
    "{% set s = namespace(x='aa') %}{% for i in range(60) %}{% set s.x = BODY %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS.replace("BODY", ""),
        ENDLESS.replace("BODY", "x"),
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 10 ** (10 ** 10) }}",
        DOUBLE.replace("BODY", "s.x ~ s.x"),
        DOUBLE.replace("BODY", "s.x + s.x"),
        "{{ lipsum(n=10000000) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(ValueError, match="^chat template: "):
        render(template, [USER], {})
    assert time.monotonic() - began < 5


def test_limits_do_not_change_the_text():
    template = (
        "{{ 'ab' * 2 }}{{ 2 * 'ab' }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 2 ** -1 }}"
        "{{ 1 ~ 'a' ~ x }}{{ [1] + [2] }}{{ 'a' + 'b' }}{{ 1 + 2.5 }}"
        "{{ 'a' ~ 'b' if true }}"
        "{% for i in range(3) if i != 1 %}{{ loop.index }}{% else %}no{% endfor %}"
        "{% macro m(a) %}<{{ a ~ 1 }}>{% endmacro %}{{ m(2) }}{{ m('é') }}"
    )
    text = "ababababab"[:8] + "680.51a" + "[1, 2]ab3.5ab" + "12" + "<21><é1>"
    assert render(template, [USER], {}) == text
    assert json.loads(render("{{ messages | tojson }}", [USER], {})) == [USER]
