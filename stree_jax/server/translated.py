"""Chat messages that were translated from another format, and the names of their fields
in that format, for errors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stree_jax.server.errors import ApiError
from stree_jax.server.messages import REASONING


@dataclass
class Translated:
    """The messages of a chat, and the fields from which they come.

    Attributes:
      name: name of the field of the messages.
      prompt: name of the field of the first system message.
      found: the messages.
      origins: name of the field of each message.
      call_origins: names of the fields of each message's tool calls.
      reasoning: reasoning that belongs to the next message of the assistant.
    """

    name: str
    prompt: str
    found: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    call_origins: list[list[str]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, where: str, message: dict[str, Any]) -> None:
        """Appends a message, with the reasoning before it."""
        if message["role"] == "assistant" and self.reasoning:
            message = message | {REASONING[0]: "\n".join(self.reasoning)}
        self.reasoning = []
        self.found.append(message)
        self.origins.append(where)
        self.call_origins.append([])

    def add_call(self, where: str, call: dict[str, Any]) -> None:
        """Appends a tool call to the assistant's message before it, or to a new one."""
        new = not self.found or self.found[-1]["role"] != "assistant"
        if new or self.reasoning:
            self.add(where, {"role": "assistant", "content": None})
        self.found[-1].setdefault("tool_calls", []).append(call)
        self.call_origins[-1].append(where)

    def renamed(self, name: str) -> str:
        """Returns the name that a field of the messages has in the request."""
        match = re.match(r"messages\.\[(\d+)\](?:\.tool_calls\.\[(\d+)\])?", name)
        if match is None or int(match[1]) >= len(self.origins):
            return re.sub("^messages", self.name, name)
        i, call = int(match[1]), match[2]
        origin = self.origins[i] if call is None else self.call_origins[i][int(call)]
        rest = name[match.end() :].replace(".function", "")
        return origin if origin == self.prompt else origin + rest


def renamed(
    error: ApiError, messages: Translated, names: Iterable[tuple[str, str]]
) -> ApiError:
    """Returns an error whose field has the name that it has in the request.

    Args:
      error: an error that names a field of a chat.
      messages: the messages.
      names: patterns of other fields of chats, and the names that replace them.
    """
    old = error.param
    if old is None:
        return error
    new = messages.renamed(old) if old.startswith("messages") else old
    for pattern, name in names:
        new = re.sub(pattern, name, new)
    text = error.message
    text = new + text[len(old) :] if text.startswith(old) else text
    return ApiError(
        error.status, text, param=new, code=error.code, headers=error.headers
    )
