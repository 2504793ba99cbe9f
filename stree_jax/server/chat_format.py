"""Finds out what a chat template supports: tools, the format of calls, reasoning."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stree_jax.server.calls import Call
from stree_jax.server.formats import FORMATS, REASONING, Format
from stree_jax.server.split import split

Message = Mapping[str, Any]
Messages = Sequence[Message]
Render = Callable[[Messages, Messages], str]  # of messages and tools

CHANNELS = ("<|channel|>", "<|message|>", "<|start|>")  # texts of gpt-oss' format
CHANNEL_TOKENS = (*CHANNELS, "<|constrain|>", "<|call|>", "<|end|>", "<|return|>")


@dataclass(frozen=True)
class ChatFormat:
    """What a chat template supports.

    Attributes:
      tools: True if the template writes tools into the prompt.
      calls: format of tool calls. None if it is unknown, or of gpt-oss.
      reasoning: texts before and behind reasoning, or None.
      channels: True for gpt-oss' format, in which all of an answer is in channels.
      text_arguments: True if the template takes arguments of calls as text.
      null_content: True if the template writes calls of messages without content only.
      several: False if the template takes one call per message. Answers then have at
        most one.
      drops_calls: True if the template leaves out calls of earlier messages. They are
        then written into the content.
    """

    tools: bool = False
    calls: Format | None = None
    reasoning: tuple[str, str] | None = None
    channels: bool = False
    text_arguments: bool = False
    null_content: bool = False
    several: bool = True
    drops_calls: bool = False

    @property
    def reads_calls(self) -> bool:
        """True if the format of tool calls is known."""
        return self.calls is not None or self.channels

    def marks(self, calls: bool) -> frozenset[str]:
        """Returns the texts that are needed to split answers. Special tokens in them,
        which decoding usually leaves out, must be decoded.

        Args:
          calls: True if the answer may have tool calls.
        """
        found = set(CHANNEL_TOKENS if self.channels else ())
        found |= set(self.reasoning or ())
        if calls and self.calls is not None:
            found |= {self.calls.opening, *self.calls.tokens}
        return frozenset(found)

    def prepared(self, messages: Messages) -> list[dict[str, Any]]:
        """Returns messages in the form that the template takes: see the attributes
        `text_arguments`, `null_content` and `drops_calls`."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: Message) -> dict[str, Any]:
        calls, found = message.get("tool_calls"), dict(message)
        if not calls:
            return found
        if self.channels and not found["content"] and "reasoning_content" in found:
            found.setdefault("thinking", found["reasoning_content"])
        if self.drops_calls and self.calls is not None and self.calls.write is not None:
            functions = [call["function"] for call in calls]
            named = [Call(f["name"], _text(f["arguments"])) for f in functions]
            found["content"] += self.calls.write(named)
            return found
        if self.text_arguments:
            found["tool_calls"] = [
                call | {"function": f | {"arguments": _text(f["arguments"])}}
                for call in calls
                for f in (call["function"],)
            ]
        if self.null_content and not found["content"]:
            found["content"] = None
        return found


def _text(arguments: Any) -> str:
    """Returns the arguments of a call as JSON text."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


USER, NAME, OTHER = "stree-jax asks", "get_weather", "find_city"
ARGUMENTS = {"city": "Paris", "days": 3}
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
    one = _rendered_calls(form, render, (NAME,))
    two = _rendered_calls(form, render, (OTHER, NAME))
    only_one = one is not None and not (two and NAME in two and OTHER in two)
    return replace(form, several=not only_one)


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
        text = _rendered_calls(own, render, (NAME,), call_id)
        rendered, written = (
            rendered or text is not None,
            written or NAME in (text or ""),
        )
        for one in tried if text else ():
            if _is_read_back(found := replace(own, calls=one), text or ""):
                return found
    if written or not hinted:  # in an unknown format
        return form
    return replace(form, calls=hinted[0], drops_calls=rendered)


def _rendered_calls(
    form: ChatFormat, render: Render, names: Sequence[str], first_id: str = IDS[0]
) -> str | None:
    """Returns the text of calls of named functions and their results, or None if the
    template fails."""
    ids = [first_id, "abcdefghj"][: len(names)]
    calls = [
        {
            "id": one,
            "type": "function",
            "function": {"name": name, "arguments": ARGUMENTS},
        }
        for one, name in zip(ids, names, strict=True)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    for one, name in zip(ids, names, strict=True):
        own = {"tool_call_id": one, "name": name}
        messages.append({"role": "tool", "content": "sunny", **own})
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
