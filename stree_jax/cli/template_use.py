"""Renders conversations with a chat template, and reports what the template drops.

A template may ignore roles that it does not know, so that part of a request could be
lost silently. This module checks that the content of every message and all tool calls
are in the prompt. Other fields, such as a name, are for templates that use them.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stree_jax.cli.chat import Message, render
from stree_jax.server.chat_format import ChatFormat, Messages
from stree_jax.server.template_format import chat_format

MAX_CHECKS = 16  # contents and calls that are checked one by one
Spell = Callable[[Sequence[Message]], str]
# The index of a message, and of one of its tool calls. Without the latter: its content.
Place = tuple[int, int | None]


def unchanged(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages as they are."""
    return messages


def render_checked(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    *,
    begins: bool = True,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    prepared: Callable[[Sequence[Message]], Sequence[Message]] = unchanged,
) -> str:
    """Renders a conversation as text with a chat template, and checks that the text
    contains all of its messages and tool calls.

    Args:
      begins: if True, the text ends with the beginning of the model's turn.
      continues: if True, it ends with the content of the last message, which the model
        then continues.
      variables: further variables of the template.
      tools: descriptions of functions that the model may call.
      prepared: changes messages to the form that the template takes.

    Raises:
      ValueError: the template fails, or drops a message.
    """
    messages = [_known_role(template, message) for message in messages]

    def spell(messages: Sequence[Message]) -> str:
        own = prepared(messages)
        return render(template, own, special_tokens, begins, variables or {}, tools)

    plain = checked(spell, messages)
    if not continues:
        return plain
    mark = secrets.token_hex(8)
    text = spell([*messages[:-1], _marked(messages[-1], mark)])
    before, found, _ = text.rpartition(mark)
    if not found:
        raise ValueError(
            "continue_final_message: the chat template changes the end of the last "
            "message, so it cannot be continued"
        )
    return before


def _known_role(template: str, message: Message) -> Message:
    """Returns the message; role "developer", the newer name of "system", becomes
    "system" unless the template knows it."""
    if message["role"] == "developer" and "developer" not in template:
        return cast(Message, {**message, "role": "system"})
    return message


def checked(spell: Spell, messages: Sequence[Message]) -> str:
    """Returns `spell(messages)`. Raises ValueError if a content or a tool call is not
    in it.

    First all contents and calls get a random mark, and the prompt is searched for the
    marks. A missing mark does not prove that the text is missing, because the template
    may rewrite it. So these texts are changed one by one: if the prompt stays the same,
    the text is not part of it.
    """
    places = _places(messages)
    marks = {place: secrets.token_hex(8) for place in places}

    def marked(places: Sequence[Place]) -> str:
        changed = list(messages)
        for place in places:
            i, call = place
            changed[i] = _marked(changed[i], marks[place], call)
        return spell(changed)

    plain = spell(messages)
    try:
        text = marked(places)
        missing = [place for place in places if marks[place] not in text]
    except ValueError:  # the template validates its texts
        missing = places
    for i, call in missing[:MAX_CHECKS]:
        try:
            same = marked([(i, call)]) == plain
        except ValueError:
            continue
        if same and call is None:
            role = messages[i]["role"]
            raise ValueError(
                f"messages.[{i}].content: the chat template leaves out this message of "
                f"role {role!r}; use another role"
            )
        if same:
            raise ValueError(
                f"messages.[{i}].tool_calls.[{call}]: the chat template leaves out "
                "this call"
            )
    return plain


def _places(messages: Sequence[Message]) -> list[Place]:
    """Returns the places of the contents that are not blank, and of the tool calls."""
    found: list[Place] = []
    for i, message in enumerate(messages):
        calls = cast(Mapping[str, Any], message).get("tool_calls") or ()
        found += [(i, None)] if message["content"].strip() else []
        found += [(i, call) for call in range(len(calls))]
    return found


def _marked(message: Message, mark: str, call: int | None = None) -> Message:
    """Returns a message with a mark in its content, or in one of its tool calls."""
    fields: dict[str, Any] = {**message}
    if call is None:
        return cast(Message, fields | {"content": f"{message['content']}{mark}"})
    calls = list(fields["tool_calls"])
    function = calls[call]["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments += mark
    else:
        arguments = arguments | {mark: mark}
    calls[call] = calls[call] | {"function": function | {"arguments": arguments}}
    return cast(Message, fields | {"tool_calls": calls})


def format_of(template: str | None, special_tokens: Mapping[str, str]) -> ChatFormat:
    """Returns what a chat template supports: tools, calls and reasoning.

    Args:
      template: the template, or None.
      special_tokens: texts of special tokens, such as `bos_token`.
    """
    if template is None:
        return ChatFormat()

    def rendered(messages: Messages, tools: Messages) -> str:
        own = cast(Sequence[Message], messages)
        return render(template, own, special_tokens, False, tools=tools)

    return chat_format(template, rendered)
