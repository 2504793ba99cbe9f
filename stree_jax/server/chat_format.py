"""The features of a chat template: tools, the format of calls, reasoning."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stree_jax.server.calls import Call
from stree_jax.server.formats import Format

Message = Mapping[str, Any]
Messages = Sequence[Message]

CHANNELS = ("<|channel|>", "<|message|>", "<|start|>")  # texts of gpt-oss' format
CHANNEL_TOKENS = (*CHANNELS, "<|constrain|>", "<|call|>", "<|end|>", "<|return|>")


@dataclass(frozen=True)
class ChatFormat:
    """The features of a chat template.

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
