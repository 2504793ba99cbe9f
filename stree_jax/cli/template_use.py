"""Renders conversations with a chat template, and reports what the template drops.

A template may ignore roles and fields that it does not know, so that part of a request
could be lost silently. This module checks that every text of the messages is in the
prompt.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stree_jax.cli.chat import Message, render

MAX_CHECKS = 16  # messages that are checked one by one
FIELDS = ("content", "name")
REASONING = "reasoning_content"
Spell = Callable[[Sequence[Message]], str]


def render_checked(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    *,
    begins: bool = True,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation as text with a chat template, and checks that the text
    contains all of its messages.

    Args:
      begins: if True, the text ends with the beginning of the model's turn.
      continues: if True, it ends with the content of the last message, which the model
        then continues.
      variables: further variables of the template.

    Raises:
      ValueError: the template fails, or drops a message or one of its fields.
    """
    messages = [_known_role(template, message) for message in messages]

    def spell(messages: Sequence[Message]) -> str:
        return render(template, messages, special_tokens, begins, variables or {})

    plain = checked(spell, messages)
    for i, message in enumerate(messages):
        if REASONING in message and REASONING not in template:
            raise ValueError(
                f"messages.[{i}].{REASONING}: the chat template does not use it; leave "
                "it out"
            )
    if not continues:
        return plain
    mark = secrets.token_hex(8)
    text = spell([*messages[:-1], _marked(messages[-1], "content", mark)])
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
    """Returns `spell(messages)`. Raises ValueError if a content or name is not in it.

    First all texts get a random mark, and the prompt is searched for the marks. A
    missing mark does not prove that the text is missing, because the template may
    rewrite it. So these texts are changed one by one: if the prompt stays the same, the
    text is not part of it.
    """
    places = [
        (i, name)
        for i, message in enumerate(messages)
        for name in FIELDS
        if str(message.get(name, "")).strip()
    ]
    marks = {place: secrets.token_hex(8) for place in places}

    def marked(places: Sequence[tuple[int, str]]) -> str:
        changed = list(messages)
        for i, name in places:
            changed[i] = _marked(changed[i], name, marks[i, name])
        return spell(changed)

    plain = spell(messages)
    try:
        text = marked(places)
        missing = [place for place in places if marks[place] not in text]
    except ValueError:  # the template validates its texts
        missing = places
    for i, name in missing[:MAX_CHECKS]:
        try:
            same = marked([(i, name)]) == plain
        except ValueError:
            continue
        if same:
            raise ValueError(_dropped(i, name, messages[i]))
    return plain


def _marked(message: Message, name: str, mark: str) -> Message:
    return cast(Message, {**message, name: f"{message.get(name)}{mark}"})


def _dropped(i: int, name: str, message: Message) -> str:
    where = f"messages.[{i}].{name}: the chat template"
    if name == "content":
        role = message["role"]
        return f"{where} leaves out this message of role {role!r}; use another role"
    return f"{where} does not use it; leave it out, or write it into the content"
