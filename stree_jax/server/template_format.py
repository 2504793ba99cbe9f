"""Finds out what a chat template supports: tools, the format of calls, reasoning."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.server.chat_format import CHANNELS, ChatFormat, Messages
from stree_jax.server.formats import FORMATS, REASONING
from stree_jax.server.split import split

Render = Callable[[Messages, Messages], str]  # of messages and tools

USER, NAME = "stree-jax asks", "get_weather"
CITIES = ("Paris", "Rome")  # of a first and a second call
ARGUMENTS = {"city": CITIES[0], "days": 3}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "Weather.", "parameters": SCHEMA},
}
IDS = ("abcdefghi", f"functions.{NAME}:0")  # as Mistral and Kimi want them


def chat_format(template: str, render: Render) -> ChatFormat:
    """Returns what a chat template supports.

    Args:
      template: the template.
      render: renders with it.
    """
    form = ChatFormat(
        tools=_uses_tools(render),
        reasoning=next((p for p in REASONING if p[1] in template), None),
        channels=all(mark in template for mark in CHANNELS),
    )
    if not form.tools:
        return form
    if not form.channels:
        form = _with_calls(template, render, form)
    one = _rendered_calls(form, render, IDS[:1])
    two = _rendered_calls(form, render, (IDS[0], "abcdefghj")) or ""
    several = one is None or all(city in two for city in CITIES)
    return replace(form, several=several)


def _uses_tools(render: Render) -> bool:
    """True if tools change the prompt."""
    asked = [{"role": "user", "content": USER}]
    texts: list[str | None] = []
    for tools in ([], [TOOL]):
        try:
            texts.append(render(asked, tools))
        except ValueError:
            texts.append(None)
    return texts[1] is not None and texts[0] != texts[1]


def _with_calls(template: str, render: Render, form: ChatFormat) -> ChatFormat:
    """Returns the form with the format of calls, found by rendering a call and reading
    it back, or by texts in the template."""
    hinted = [f for f in FORMATS if any(hint in template for hint in f.hints)]
    tried = [f for f in FORMATS if f in hinted or not f.at_start]
    rendered = written = False
    for null, as_text, call_id in itertools.product((False, True), (False, True), IDS):
        own = replace(form, text_arguments=as_text, null_content=null)
        text = _rendered_calls(own, render, (call_id,))
        if text is None:
            continue
        rendered, written = True, written or CITIES[0] in text
        for one in tried:
            if _is_read_back(found := replace(own, calls=one), text):
                return found
    if written or not hinted:  # in an unknown format
        return form
    return replace(form, calls=hinted[0], drops_calls=rendered)


def _rendered_calls(form: ChatFormat, render: Render, ids: Sequence[str]) -> str | None:
    """Returns the text of one or two calls with these ids and their results, or None if
    the template fails."""
    calls = []
    for one, city in zip(ids, CITIES, strict=False):
        function = {"name": NAME, "arguments": ARGUMENTS | {"city": city}}
        calls.append({"id": one, "type": "function", "function": function})
    result = {"role": "tool", "name": NAME, "content": "sunny"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(result | {"tool_call_id": one} for one in ids),
    ]
    try:
        return render(form.prepared(messages), [TOOL]).rpartition(USER)[2]
    except ValueError:
        return None


def _is_read_back(form: ChatFormat, text: str) -> bool:
    """True if the call in a rendered text is found in this format."""
    if form.calls is not None and form.calls.at_start:
        begin = text.find(form.calls.opening)
        text = text[begin:] if begin >= 0 else ""
    calls = split(text, form, {NAME: SCHEMA["properties"]}, final=True).calls
    if len(calls) != 1 or calls[0].name != NAME:
        return False
    try:
        return json.loads(calls[0].arguments) == ARGUMENTS
    except ValueError:
        return False
