"""Answers in the protocol's format: complete answers, and chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stree_jax.server.protocol import Request
from stree_jax.server.texts import Choice, Piece
from stree_jax.version import __version__

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"stree-jax-{__version__}"


@dataclass
class Answer:
    """The answer to a request, with the texts generated so far.

    Attributes:
      request: the request.
      prompt_tokens: number of tokens of all prompts.
      texts, tokens, finish_reasons, logprobs: one entry per text, prompt by prompt, and
        for each prompt its n texts.
    """

    request: Request
    prompt_tokens: int
    texts: list[str]
    tokens: list[int]
    finish_reasons: list[str | None]
    logprobs: list[list[Choice]]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens, in the protocol's format."""
        generated = sum(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }

    @property
    def finished(self) -> bool:
        """True if all texts are finished."""
        return None not in self.finish_reasons

    def add(self, index: int, piece: Piece) -> None:
        """Appends a piece to a text."""
        self.texts[index] += piece.text
        self.tokens[index] += piece.tokens
        self.logprobs[index] += piece.logprobs
        self.finish_reasons[index] = piece.finish_reason


def empty_answer(request: Request, prompt_tokens: int, texts: int) -> Answer:
    """Returns the answer to a request before its first piece.

    Args:
      request: the request.
      prompt_tokens: number of tokens of all prompts.
      texts: number of texts.
    """
    return Answer(
        request,
        prompt_tokens,
        [""] * texts,
        [0] * texts,
        [None] * texts,
        [[] for _ in range(texts)],
    )


def whole(answer: Answer) -> dict[str, Any]:
    """Returns the response to a request without `stream`."""
    chat = answer.request.kind == "chat"
    choices = []
    for i, text in enumerate(answer.texts):
        message = {"role": "assistant", "content": text, "refusal": None}
        choices.append(
            {
                "index": i,
                **({"message": message} if chat else {"text": text}),
                "logprobs": _logprobs(answer, answer.logprobs[i], 0),
                "finish_reason": answer.finish_reasons[i],
            }
        )
    kind = "chat.completion" if chat else "text_completion"
    return _envelope(answer, kind) | {"choices": choices, "usage": answer.usage}


def opening(answer: Answer) -> list[bytes]:
    """Returns the first events of a stream, which give the role in chats."""
    if answer.request.kind != "chat":
        return []
    delta = {"role": "assistant", "content": "", "refusal": None}
    indices = range(len(answer.texts))
    return [_chunk(answer, i, {"delta": delta}, None, None) for i in indices]


def chunks(answer: Answer, index: int, piece: Piece) -> list[bytes]:
    """Returns the events of a stream for one piece of a text.

    Args:
      answer: the answer, to which the piece was added.
      index: index of the text.
      piece: the piece.
    """
    chat, events = answer.request.kind == "chat", []
    before = len(answer.logprobs[index]) - len(piece.logprobs)
    offset = sum(len(_text(c.token)) for c in answer.logprobs[index][:before])
    lists = _logprobs(answer, piece.logprobs, offset)
    if piece.text or piece.logprobs:
        new = {"delta": {"content": piece.text}} if chat else {"text": piece.text}
        events.append(_chunk(answer, index, new, lists, None))
    if piece.finish_reason is not None:
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        events.append(_chunk(answer, index, last, None, piece.finish_reason))
    return events


def closing(answer: Answer) -> list[bytes]:
    """Returns the last events of a stream, including the usage if it was requested."""
    if not answer.request.usage:
        return [DONE]
    last = _envelope(answer, _chunk_kind(answer)) | {
        "choices": [],
        "usage": answer.usage,
    }
    return [event(last), DONE]


def event(body: dict[str, Any]) -> bytes:
    """Returns a JSON body as a server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunk(
    answer: Answer,
    index: int,
    new: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None,
) -> bytes:
    """Returns the event of one chunk of a stream."""
    choice = {"index": index, **new, "logprobs": logprobs, "finish_reason": reason}
    body = _envelope(answer, _chunk_kind(answer)) | {"choices": [choice]}
    return event(body | ({"usage": None} if answer.request.usage else {}))


def _chunk_kind(answer: Answer) -> str:
    chat = answer.request.kind == "chat"
    return "chat.completion.chunk" if chat else "text_completion"


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    """Returns the fields that all responses to a request have."""
    prefix = "chatcmpl" if answer.request.kind == "chat" else "cmpl"
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.request.model,
        "system_fingerprint": FINGERPRINT,
    }


def _logprobs(
    answer: Answer, choices: Sequence[Choice], offset: int
) -> dict[str, Any] | None:
    """Returns log-probabilities in the format of the endpoint, or None if they were not
    requested.

    Args:
      answer: the answer.
      choices: the tokens.
      offset: number of characters of the text before the first token.
    """
    if answer.request.top_logprobs is None:
        return None
    if answer.request.kind == "chat":
        entries = [
            _entry(c.token, c.logprob)
            | {"top_logprobs": [_entry(token, p) for token, p in c.top]}
            for c in choices
        ]
        return {"content": entries, "refusal": None}
    texts = [_text(c.token) for c in choices]
    offsets, at = [], offset
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [c.logprob for c in choices],
        "top_logprobs": [{_text(token): p for token, p in c.top} for c in choices],
        "text_offset": offsets,
    }


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
