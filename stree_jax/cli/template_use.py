"""Renders conversations with a chat template, and reports what the template drops.

A template may ignore roles that it does not know, so that part of a request could be
lost silently. This module checks that the content of every message is in the prompt.
Other fields, such as a name, are for templates that use them.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stree_jax.cli.chat import Message, render

MAX_CHECKS = 16  # messages that are checked one by one
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
      ValueError: the template fails, or drops a message.
    """
    messages = [_known_role(template, message) for message in messages]

    def spell(messages: Sequence[Message]) -> str:
        return render(template, messages, special_tokens, begins, variables or {})

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
    """Returns `spell(messages)`. Raises ValueError if a content is not in it.

    First all contents get a random mark, and the prompt is searched for the marks. A
    missing mark does not prove that the text is missing, because the template may
    rewrite it. So these texts are changed one by one: if the prompt stays the same, the
    text is not part of it.
    """
    places = [i for i, m in enumerate(messages) if m["content"].strip()]
    marks = {i: secrets.token_hex(8) for i in places}

    def marked(places: Sequence[int]) -> str:
        changed = list(messages)
        for i in places:
            changed[i] = _marked(changed[i], marks[i])
        return spell(changed)

    plain = spell(messages)
    try:
        text = marked(places)
        missing = [i for i in places if marks[i] not in text]
    except ValueError:  # the template validates its texts
        missing = places
    for i in missing[:MAX_CHECKS]:
        try:
            same = marked([i]) == plain
        except ValueError:
            continue
        if same:
            role = messages[i]["role"]
            raise ValueError(
                f"messages.[{i}].content: the chat template leaves out this message of "
                f"role {role!r}; use another role"
            )
    return plain


def _marked(message: Message, mark: str) -> Message:
    return cast(Message, {**message, "content": f"{message['content']}{mark}"})
