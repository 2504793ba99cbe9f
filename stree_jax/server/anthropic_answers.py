"""Answers in the format of Anthropic's Messages API: complete ones, event streams, and
errors.

`anthropic_fields` translates the requests. A stream has one block after the other.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from stree_jax.server.answers import Answer, deltas, finish_reason
from stree_jax.server.anthropic_fields import parse_message, renamed
from stree_jax.server.calls import Call
from stree_jax.server.chat_answers import CallId
from stree_jax.server.errors import ApiError
from stree_jax.server.service import Service, check_name, encoded_prompts
from stree_jax.server.split import Parts
from stree_jax.server.texts import Piece

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NOT_JSON = "INVALID_JSON"  # Anthropic's name for arguments that are not an object


def counted(service: Service, body: Any) -> dict[str, Any]:
    """Returns the number of tokens of a prompt; raises ApiError if it is invalid.

    Args:
      service: the service.
      body: the JSON body: the fields of a message. `max_tokens` is ignored.
    """
    limit = {"max_tokens": 1}
    request = parse_message(body | limit if isinstance(body, dict) else body)
    check_name(service, request.model or service.name)
    try:
        (prompt,) = encoded_prompts(service, request)
    except ApiError as error:
        raise renamed(error) from None
    return {"input_tokens": len(prompt.ids)}


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the JSON body of an error, whose `details` name the field."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    about = {"error_code": error.code, "param": error.field}
    fields = {
        "type": ERRORS.get(error.status, kind),
        "message": error.text(),
        "details": {name: v for name, v in about.items() if v is not None},
    }
    return {"type": "error", "error": fields}


@dataclass
class MessageWriter:
    """Writes an answer in the format of the Messages API.

    Attributes:
      answer: the answer.
      open: type of the block that a stream is in, or "".
      index: index of that block, or of the next one.
    """

    answer: Answer
    open: str = ""
    index: int = 0

    def whole(self) -> dict[str, Any]:
        """Returns the response to a request without `stream`."""
        parts = self.answer.parts(0)
        call_id = partial(self.answer.call_id, 0)
        usage = self._usage(self.answer.usage["completion_tokens"])
        content = list(_content(parts, self.answer.id, call_id))
        return self._message() | {"content": content, "usage": usage} | self._end(parts)

    def opening(self) -> list[bytes]:
        """Returns the first event of a stream."""
        message = self._message() | {"usage": self._usage(0)}
        return [_event("message_start", message=message)]

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        """Returns the events of a stream for a piece that was added to the answer."""
        found = deltas(self.answer, 0)
        return [event for delta in found for event in self._events(delta)]

    def closing(self) -> list[bytes]:
        """Returns the last events of a stream."""
        usage = self._usage(self.answer.usage["completion_tokens"])
        end = self._end(self.answer.parts(0))
        last = _event("message_delta", delta=end, usage=usage)
        return [*self._close(), last, _event("message_stop")]

    def _message(self) -> dict[str, Any]:
        """Returns the fields of a message before its first block."""
        return {
            "id": f"msg_{self.answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self, generated: int) -> dict[str, Any]:
        """Returns the numbers of tokens. Cached ones are known at the end only."""
        usage = self.answer.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        }

    def _end(self, parts: Parts) -> dict[str, Any]:
        """Returns the reason for the end of the answer, and its stop sequence."""
        answer, stop = self.answer, None
        match finish_reason(answer, 0, parts):
            case "tool_calls":
                reason = "tool_use"
            case "length":
                most = answer.request.max_tokens
                full = most is not None and answer.tokens[0] < most
                reason = "model_context_window_exceeded" if full else "max_tokens"
            case _:
                stop = answer.stops[0]
                reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _events(self, delta: dict[str, Any]) -> Iterator[bytes]:
        """Yields the events for what a chat's stream would send."""
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            if "id" in call:
                about = {"id": call["id"], "name": call["function"]["name"]}
                yield from self._begin("tool_use", about | {"input": {}})
            text = call["function"]["arguments"]
            yield from self._more("input_json", "partial_json", text)
        elif "content" in delta:
            text = delta["content"]
            if self.open == "tool_use":  # text behind a call
                text = text.removeprefix("\n")
            if self.open != "text" and text:
                yield from self._begin("text", {"text": ""})
            yield from self._more("text", "text", text)
        else:
            if not self.open:
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield from self._more("thinking", "thinking", delta["reasoning_content"])

    def _begin(self, kind: str, about: dict[str, Any]) -> Iterator[bytes]:
        """Ends the open block and begins one."""
        yield from self._close()
        self.open = kind
        block = {"type": kind} | about
        yield _event("content_block_start", index=self.index, content_block=block)

    def _more(self, kind: str, name: str, text: str) -> Iterator[bytes]:
        """Yields the event that adds to the open block, if there is something to add.

        Args:
          kind: the kind of delta.
          name: name of the field with the text.
          text: the text.
        """
        if text:
            delta = {"type": f"{kind}_delta", name: text}
            yield _event("content_block_delta", index=self.index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """Yields the events that end the open block, if there is one."""
        if not self.open:
            return
        if self.open == "thinking":
            yield from self._more("signature", "signature", self.answer.id)
        yield _event("content_block_stop", index=self.index)
        self.open, self.index = "", self.index + 1


def _content(parts: Parts, signature: str, call_id: CallId) -> Iterator[dict[str, Any]]:
    """Yields the blocks of a finished answer.

    Args:
      parts: the parts of its text.
      signature: signature of the reasoning. Some clients only send back reasoning that
        has one. This server does not check it.
      call_id: returns the id of a call.
    """
    if parts.reasoning:
        own = {"thinking": parts.reasoning, "signature": signature}
        yield {"type": "thinking"} | own
    if parts.content:
        yield {"type": "text", "text": parts.content}
    for i, call in enumerate(parts.calls):
        about = {"id": call_id(i, call.name), "name": call.name}
        yield {"type": "tool_use"} | about | {"input": _input(call)}


def _input(call: Call) -> dict[str, Any]:
    """Returns the arguments of a call. If they are not a JSON object, because the model
    made a mistake or was cut, their text is the value of the field `INVALID_JSON`. Lone
    surrogates, which UTF-8 cannot encode, become "?"."""
    try:
        found = json.loads(call.arguments)
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        found = json.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {NOT_JSON: call.arguments}


def failed(error: ApiError) -> bytes:
    """Returns the event of an error in a stream."""
    return _event(**error_body(error))


def _event(type: str, **about: Any) -> bytes:
    """Returns a server-sent event."""
    data = json.dumps({"type": type} | about, separators=(",", ":"))
    return f"event: {type}\ndata: {data}\n\n".encode()
