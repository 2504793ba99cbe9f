"""Messages of chats, and their pieces in streams, with reasoning and tool calls."""

import secrets
import string
from collections.abc import Callable, Iterator
from typing import Any

from stree_jax.server.split import Parts

LETTERS = string.ascii_letters + string.digits
CallId = Callable[[int, str], str]  # of the index of a call and its function


def new_id(kind: str, name: str, number: int) -> str:
    """Returns a new id for a tool call.

    Args:
      kind: the form of the id, see `Format.ids`.
      name: name of the function.
      number: number of earlier calls in the conversation.
    """
    if kind == "indexed":
        return f"functions.{name}:{number}"
    prefix, size = ("", 9) if kind == "short" else ("call_", 24)
    return prefix + "".join(secrets.choice(LETTERS) for _ in range(size))


def message_of(parts: Parts, call_id: CallId) -> dict[str, Any]:
    """Returns the message of a chat. Its content is null if there are only calls."""
    content = None if parts.calls and not parts.content else parts.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        message["tool_calls"] = [
            {
                "id": call_id(i, call.name),
                "type": "function",
                "function": call._asdict(),
            }
            for i, call in enumerate(parts.calls)
        ]
    return message


def added(before: Parts, parts: Parts, call_id: CallId) -> Iterator[dict[str, Any]]:
    """Yields the deltas of a stream from earlier parts of a text to its parts now. The
    rest of a call goes before text behind it."""
    if reasoning := parts.reasoning[len(before.reasoning) :]:
        yield {"reasoning_content": reasoning}
    for i, (call, earlier) in enumerate(zip(parts.calls, before.calls, strict=False)):
        yield from _arguments(i, call.arguments[len(earlier.arguments) :])
    if content := parts.content[len(before.content) :]:
        yield {"content": content}
    for i, call in list(enumerate(parts.calls))[len(before.calls) :]:
        own = {"id": call_id(i, call.name), "type": "function"}
        function = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": i, **own, "function": function}]}
        yield from _arguments(i, call.arguments)


def _arguments(index: int, text: str) -> Iterator[dict[str, Any]]:
    """Yields the delta that adds text to the arguments of a call, if there is any."""
    if text:
        yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
