"""Answers in the protocol's format: complete answers, and chunks of a stream."""

import codecs
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from stree_jax.common.version import __version__
from stree_jax.server.chat_answers import added, message_of, new_id
from stree_jax.server.protocol import Request
from stree_jax.server.split import Parts, Splitter
from stree_jax.server.texts import Choice, Piece, Proposed, Token
from stree_jax.speculation.draft import ORIGINS

SPLITS = 64  # see `deltas`
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"stree-jax-{__version__}"
NO_LISTS: Mapping[str, Any] = MappingProxyType({"logprobs": None})


@dataclass(frozen=True)
class Timings:
    """Token counts and seconds of a finished request.

    Attributes:
      cached: number of prompt tokens that were not prefilled.
      prefill_s: seconds of prefill, summed over texts.
      decode_s: seconds from the end of a text's prefill to its last piece; the longest
        of all texts.
      calls: target passes, summed over texts.
    """

    cached: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    calls: int = 0


@dataclass
class Answer:
    """The answer to a request, with the texts generated so far.

    Attributes:
      request: the request.
      prompt_tokens: number of tokens of all prompts.
      texts, tokens, finish_reasons, logprobs, origins: one entry per text, prompt by
        prompt, and for each prompt its n texts.
      timings: set when the answer is finished. None if nothing was generated.
      splitter: splits texts into reasoning, content and tool calls. If None, they are
        all content.
      stops: the stop string that ended each text, or None.
      sent: the parts of each text that were streamed.
      next_split: length of each text at which a stream splits it again.
      call_ids: the ids of each text's tool calls.
    """

    request: Request
    prompt_tokens: int
    texts: list[str]
    tokens: list[int]
    finish_reasons: list[str | None]
    logprobs: list[list[Choice]]
    origins: list[list[Proposed]]
    timings: Timings | None = None
    splitter: Splitter | None = None
    stops: list[str | None] = field(default_factory=list)
    sent: list[Parts] = field(default_factory=list)
    next_split: list[int] = field(default_factory=list)
    call_ids: list[list[str]] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, in the protocol's format."""
        generated = sum(self.tokens)
        cached = 0 if self.timings is None else self.timings.cached
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
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
        self.origins[index] += piece.origins
        self.finish_reasons[index] = piece.finish_reason
        self.stops[index] = piece.stop

    def parts(self, index: int) -> Parts:
        """Returns the parts of a text so far."""
        text, final = self.texts[index], self.finish_reasons[index] is not None
        if self.splitter is None:
            return Parts(content=text)
        return self.splitter(text, final)

    def call_id(self, index: int, call: int, name: str) -> str:
        """Returns the id of a tool call of a text; `name` is its function."""
        ids = self.call_ids[index]
        while len(ids) <= call:
            ids.append(self._new_id(name, len(ids)))
        return ids[call]

    def _new_id(self, name: str, call: int) -> str:
        """Returns a new id for a tool call, in the form that the template takes."""
        format_ = None if self.splitter is None else self.splitter.form.calls
        earlier = sum(len(m.get("tool_calls", ())) for m in self.request.messages)
        return new_id(
            "openai" if format_ is None else format_.ids, name, earlier + call
        )


def empty_answer(
    request: Request,
    prompt_tokens: int,
    texts: int,
    splitter: Splitter | None = None,
) -> Answer:
    """Returns the answer to a request before its first piece.

    Args:
      request: the request.
      prompt_tokens: number of tokens of all prompts.
      texts: number of texts.
      splitter: see `Answer`.
    """
    return Answer(
        request,
        prompt_tokens,
        [""] * texts,
        [0] * texts,
        [None] * texts,
        [[] for _ in range(texts)],
        [[] for _ in range(texts)],
        splitter=splitter,
        stops=[None] * texts,
        sent=[Parts()] * texts,
        next_split=[0] * texts,
        call_ids=[[] for _ in range(texts)],
    )


class ChatWriter:
    """Writes an answer in the format of chats or completions."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def whole(self) -> dict[str, Any]:
        """Returns the response to a request without `stream`."""
        return whole(self.answer)

    def opening(self) -> list[bytes]:
        """Returns the first events of a stream."""
        return opening(self.answer)

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        """Returns the events of a stream for a piece that was added to text `index`."""
        return chunks(self.answer, index, piece)

    def closing(self) -> list[bytes]:
        """Returns the last events of a stream."""
        return closing(self.answer)


def whole(answer: Answer) -> dict[str, Any]:
    """Returns the response to a request without `stream`."""
    chat = answer.request.kind == "chat"
    choices = []
    for i, text in enumerate(answer.texts):
        parts = answer.parts(i)
        message = message_of(parts, partial(answer.call_id, i)) if chat else {}
        choices.append(
            {
                "index": i,
                **({"message": message} if chat else {"text": text}),
                **_lists(answer, answer.logprobs[i], answer.origins[i]),
                "finish_reason": finish_reason(answer, i, parts),
            }
        )
    kind = "chat.completion" if chat else "text_completion"
    body = {"choices": choices, "usage": answer.usage} | _timings(answer)
    return _envelope(answer, kind) | body


def finish_reason(answer: Answer, index: int, parts: Parts) -> str | None:
    """Returns the reason for the end of a text, in the protocol's words."""
    reason = answer.finish_reasons[index]
    return "tool_calls" if parts.calls and reason == "stop" else reason


def _timings(answer: Answer) -> dict[str, Any]:
    """Returns the field `timings` of an answer, in the format of llama.cpp's server and
    with the acceptance length, or {} if nothing was generated."""
    times = answer.timings
    if times is None:
        return {}
    figures: dict[str, Any] = {"cache_n": times.cached}
    for name, tokens, seconds in (
        ("prompt", answer.prompt_tokens - times.cached, times.prefill_s),
        ("predicted", sum(answer.tokens), times.decode_s),
    ):
        figures |= {
            f"{name}_n": tokens,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / max(tokens, 1),
            f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
        }
    figures["target_calls"] = times.calls
    figures["acceptance_length"] = sum(answer.tokens) / max(times.calls, 1)
    return {"timings": figures}


def opening(answer: Answer) -> list[bytes]:
    """Returns the first events of a stream, which give the role in chats."""
    if answer.request.kind != "chat":
        return []
    delta = {"role": "assistant", "content": "", "refusal": None}
    indices = range(len(answer.texts))
    return [_chunk(answer, i, {"delta": delta}, NO_LISTS, None) for i in indices]


def chunks(answer: Answer, index: int, piece: Piece) -> list[bytes]:
    """Returns the events of a stream for one piece of a text.

    Args:
      answer: the answer, to which the piece was added.
      index: index of the text.
      piece: the piece.
    """
    chat, events = answer.request.kind == "chat", []
    before = len(answer.logprobs[index]) - len(piece.logprobs)
    earlier = answer.logprobs[index][:before]
    lists = _lists(answer, piece.logprobs, piece.origins, earlier)
    if chat and answer.splitter is not None:
        new_parts = list(deltas(answer, index))
    else:
        new_parts = [{"content": piece.text}] if piece.text else []
    if (piece.logprobs or piece.origins) and not new_parts:
        new_parts = [{"content": ""}]
    for delta in new_parts:
        new = {"delta": delta} if chat else {"text": delta["content"]}
        events.append(_chunk(answer, index, new, lists, None))
        lists = _lists(answer, (), ())
    if piece.finish_reason is not None:
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        # In the last event of the answer, as in llama.cpp.
        times = {} if answer.request.usage or not answer.finished else _timings(answer)
        reason = finish_reason(answer, index, answer.sent[index])
        events.append(_chunk(answer, index, last, NO_LISTS, reason, times))
    return events


def deltas(answer: Answer, index: int) -> Iterator[dict[str, Any]]:
    """Yields what a text's parts add to those that were streamed, and updates them.

    Splitting a text again costs time in proportion to its length. So once a text has
    calls, it is split only when it has grown by 1/SPLITS, or is complete.
    """
    before, size = answer.sent[index], len(answer.texts[index])
    running = answer.finish_reasons[index] is None
    if running and before.calls and size < answer.next_split[index]:
        return
    answer.next_split[index] = size + size // SPLITS
    parts = answer.sent[index] = answer.parts(index)
    yield from added(before, parts, partial(answer.call_id, index))


def closing(answer: Answer) -> list[bytes]:
    """Returns the last events of a stream, including the usage if it was requested."""
    if not answer.request.usage:
        return [DONE]
    last = _envelope(answer, _chunk_kind(answer)) | {
        "choices": [],
        "usage": answer.usage,
        **_timings(answer),
    }
    return [event(last), DONE]


def event(body: dict[str, Any]) -> bytes:
    """Returns a JSON body as a server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunk(
    answer: Answer,
    index: int,
    new: dict[str, Any],
    lists: Mapping[str, Any],
    reason: str | None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Returns the event of one chunk of a stream, with the fields `more`, and the
    lists of tokens that `_lists` returns."""
    choice = {"index": index, **new, **lists, "finish_reason": reason}
    body = _envelope(answer, _chunk_kind(answer)) | {"choices": [choice], **more}
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


def _lists(
    answer: Answer,
    choices: Sequence[Choice],
    origins: Sequence[Proposed],
    before: Sequence[Choice] = (),
) -> dict[str, Any]:
    """Returns the fields of a choice that list tokens: log-probabilities (null if not
    requested), and what proposed them, if that was requested."""
    lists: dict[str, Any] = {"logprobs": _logprobs(answer, choices, before)}
    if answer.request.origins:
        lists["origins"] = [[text, ORIGINS[origin]] for text, origin in origins]
    return lists


def _logprobs(
    answer: Answer, choices: Sequence[Choice], before: Sequence[Choice] = ()
) -> dict[str, Any] | None:
    """Returns log-probabilities in the format of the endpoint, or None if they were not
    requested.

    Args:
      answer: the answer.
      choices: the tokens.
      before: the tokens of the text before these.
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
    return {
        "tokens": [_unique_text(c.token) for c in choices],
        "token_logprobs": [c.logprob for c in choices],
        "top_logprobs": [_by_text(c.top) for c in choices],
        "text_offset": _offsets(before, choices),
    }


def _entry(token: Token, logprob: float) -> dict[str, Any]:
    """Returns a token in the format of chats. The bytes of all tokens of a text,
    joined, are the text's."""
    text = token.name.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(token.data)}


def _by_text(top: Sequence[tuple[Token, float]]) -> dict[str, float]:
    """Returns a dictionary from tokens' texts to their log-probabilities, the format of
    completions. If several tokens have the same text, it is the key of the likeliest
    one, and the keys of the others are their ids."""
    found: dict[str, float] = {}
    for token, logprob in top:
        text = _unique_text(token)
        found[f"token_id:{token.id}" if text in found else text] = logprob
    return found


def _unique_text(token: Token) -> str:
    """Returns the text of a token. For a token that splits a character, it lists the
    bytes, "bytes:\\xf0\\x9f", as in OpenAI's completions."""
    try:
        return token.name.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.name)


def _offsets(before: Sequence[Choice], choices: Sequence[Choice]) -> list[int]:
    """Returns the index of each token's first character in the text. Tokens that share
    a character have the same index.

    Args:
      before: the tokens before the first one.
      choices: the tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = len(decoder.decode(b"".join(choice.token.data for choice in before)))
    offsets = []
    for choice in choices:
        offsets.append(at)
        at += len(decoder.decode(choice.token.data))
    return offsets
