"""Answers in the format of OpenAI's Responses API: complete ones, and event streams.

`response_fields` translates the requests. An answer has up to one reasoning, one
message, and the tool calls, in the order in which they begin.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stree_jax.server.answers import Answer
from stree_jax.server.split import Parts
from stree_jax.server.texts import Piece

# Fields of requests that answers repeat, with their values in requests without them.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "user": None,
}
# Fields with the same value in all answers.
CONSTANT: dict[str, Any] = {
    "background": False,
    "error": None,
    "previous_response_id": None,
    "store": False,
    "truncation": "disabled",
}
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of ids


@dataclass
class _Item:
    """An item of the output.

    Attributes:
      kind: "reasoning", "message" or "function_call".
      about: the fields besides the text.
      text: the text, or the arguments, so far.
      status: "in_progress", "completed" or "incomplete".
      id: its id.
    """

    kind: str
    about: dict[str, Any]
    text: str = ""
    status: str = "in_progress"
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    def part(self, text: str) -> dict[str, Any]:
        """Returns the part of the content that holds a text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def body(self) -> dict[str, Any]:
        """Returns the item in the protocol's format."""
        own = {"type": self.kind, "id": self.id, "status": self.status} | self.about
        if self.kind == "function_call":
            return own | {"arguments": self.text}
        begun = self.text or self.status != "in_progress"
        return own | {"content": [self.part(self.text)] if begun else []}


@dataclass
class ResponseWriter:
    """Writes an answer in the format of the Responses API.

    Attributes:
      answer: the answer.
      body: the fields of the request.
      items: the items of the output so far.
    """

    answer: Answer
    body: Mapping[str, Any]
    items: dict[str, _Item] = field(default_factory=dict)
    _events: int = 0

    def whole(self) -> dict[str, Any]:
        """Returns the response to a request without `stream`."""
        for _ in (*self._new_text(), *self._ends()):
            pass
        return self._response(self._status())

    def opening(self) -> list[bytes]:
        """Returns the first events of a stream."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        """Returns the events of a stream for a piece that was added to the answer."""
        return list(self._new_text())

    def closing(self) -> list[bytes]:
        """Returns the last events of a stream."""
        events = list(self._ends())
        status = self._status()
        kind = f"response.{status}"
        return [*events, self._event(kind, response=self._response(status))]

    def _status(self) -> str:
        """Returns the status of the finished answer."""
        cut = self.answer.finish_reasons[0] == "length"
        return "incomplete" if cut else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        """Returns the response object."""
        cut = status == "incomplete"
        finished = status != "in_progress"
        given = {name: self.body.get(name) for name in REPEATED}
        own = {k: v if given[k] is None else given[k] for k, v in REPEATED.items()}
        return own | {
            "id": f"resp_{self.answer.id}",
            "object": "response",
            "created_at": self.answer.created,
            "model": self.answer.request.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item.body() for item in self.items.values()],
            "usage": self._usage() if finished else None,
            **CONSTANT,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted
            "total_tokens": usage["total_tokens"],
        }

    def _new_text(self) -> Iterator[bytes]:
        """Adds the text that the answer has gained to the items. Yields the events."""
        parts = self.answer.parts(0)
        if parts.reasoning:
            about: dict[str, Any] = {"summary": []}
            yield from self._grown("reasoning", "reasoning", about, parts.reasoning)
        if parts.content or self._is_empty(parts):
            about = {"role": "assistant"}
            yield from self._grown("message", "message", about, parts.content)
        for i, call in enumerate(parts.calls):
            call_id = self.answer.call_id(0, i, call.name)
            about = {"call_id": call_id, "name": call.name}
            yield from self._grown(f"{i}", "function_call", about, call.arguments)

    def _is_empty(self, parts: Parts) -> bool:
        """True if an answer is finished without text, calls or cut reasoning."""
        cut = parts.reasoning and self.answer.finish_reasons[0] == "length"
        return self.answer.finished and not parts.calls and not cut

    def _grown(
        self, key: str, kind: str, about: dict[str, Any], text: str
    ) -> Iterator[bytes]:
        """Lets an item grow to a text. Yields the events."""
        if key not in self.items:
            for other in self.items.values():
                if other.kind != "message":  # text may follow calls
                    yield from self._end(other, "completed")
            self.items[key] = _Item(kind, about)
            yield self._item_event("added", self.items[key])
            if kind != "function_call":
                part = self.items[key].part("")
                yield self._part_event("content_part.added", self.items[key], part=part)
        item = self.items[key]
        if new := text[len(item.text) :]:
            item.text = text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._part_event(f"{_name(item)}.delta", item, delta=new, **more)

    def _ends(self) -> Iterator[bytes]:
        """Finishes all items. Yields the events."""
        for i, item in enumerate(self.items.values()):
            last = i == len(self.items) - 1
            yield from self._end(item, self._status() if last else "completed")

    def _end(self, item: _Item, status: str) -> Iterator[bytes]:
        """Finishes an item, if it is not finished. Yields the events."""
        if item.status != "in_progress":
            return
        item.status = status
        if item.kind == "function_call":
            own = {"arguments": item.text, "name": item.about["name"]}
            yield self._part_event(f"{_name(item)}.done", item, **own)
        else:
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield self._part_event(f"{_name(item)}.done", item, text=item.text, **more)
            part = item.part(item.text)
            yield self._part_event("content_part.done", item, part=part)
        yield self._item_event("done", item)

    def _item_event(self, what: str, item: _Item) -> bytes:
        index = list(self.items.values()).index(item)
        kind = f"response.output_item.{what}"
        return self._event(kind, output_index=index, item=item.body())

    def _part_event(self, kind: str, item: _Item, **more: Any) -> bytes:
        """Returns an event about the text of an item."""
        index = list(self.items.values()).index(item)
        place = {} if item.kind == "function_call" else {"content_index": 0}
        about = {"item_id": item.id, "output_index": index} | place | more
        return self._event(f"response.{kind}", **about)

    def _event(self, kind: str, **about: Any) -> bytes:
        """Returns a server-sent event with the next number."""
        body = {"type": kind, "sequence_number": self._events} | about
        self._events += 1
        data = json.dumps(body, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _name(item: _Item) -> str:
    """Returns the name of the events for the text of an item."""
    return {
        "reasoning": "reasoning_text",
        "message": "output_text",
        "function_call": "function_call_arguments",
    }[item.kind]
