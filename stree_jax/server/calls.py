"""Reads tool calls in generated text. Each reader is a pure function of a text.

A reader gets the text so far and the index behind the text that opens calls. Longer
texts only add calls, or text to the arguments of the last one, so that a stream can
show the difference between two results.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Maximum characters of the text before the arguments of a call. A longer text without
# arguments is not a call.
MAX_HEAD = 512
TOOL_NAME = r"[A-Za-z0-9_.\-]+"
# The first key of an object that may be a call.
CALL_KEYS = {"name", "tool_name", "id", "tool_call_id", "type", "parameters"}

Schemas = Mapping[str, Mapping[str, Any]]  # by function: the schemas of its parameters


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
      name: name of the function.
      arguments: its arguments as JSON. Of a call that the model has not finished, only
        the beginning.
    """

    name: str
    arguments: str


class Section(NamedTuple):
    """The calls behind a text that opens calls.

    Attributes:
      calls: the calls so far.
      end: index behind the section. None if the text ends within it.
      rest: index of text behind the calls that is not clear yet. It is content if the
        text ends here. None if there is no such text.
    """

    calls: tuple[Call, ...]
    end: int | None
    rest: int | None = None


# A reader returns None if the text cannot be a call.
Read = Callable[[str, int, Schemas], Section | None]

SPACE = " \t\r\n"
# Strings and brackets. The last string may be unfinished.
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*\\?(?:"|\Z)|[{}\[\]]', re.S)
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_CONTROL = re.compile(r"[\x00-\x1f]")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_JSON_HEAD = re.compile(
    r'\{\s*(?:"(?:id|tool_call_id|type)"\s*:\s*"[^"\\]*"\s*,\s*)*'
    rf'"(?:name|tool_name)"\s*:\s*"(?P<name>{TOOL_NAME})"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class JsonCalls:
    """A reader of JSON objects {"name": .., "arguments": ..}: one, several, or a list.

    Attributes:
      closing: text behind the calls, or "".
      known_only: True if only names of the request's tools make an object a call.
    """

    closing: str = ""
    known_only: bool = False

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        calls: list[Call] = []
        while True:
            at = skip(text, at, SPACE + ",;[]")
            if at == len(text):
                return Section(tuple(calls), None)
            if text[at] != "{":
                return _closed(text, at, calls, self.closing)
            known = schemas if self.known_only else None
            call, end = _json_call(text, at, known)
            if call is None and end is not None:
                return None if not calls else Section(tuple(calls), at)
            calls += [] if call is None else [call]
            if end is None:
                return Section(tuple(calls), None)
            at = end


def _closed(text: str, at: int, calls: Sequence[Call], closing: str) -> Section | None:
    """Returns the section whose calls end at `at`, or None if it has no calls."""
    if closing and text.startswith(closing, at):
        return Section(tuple(calls), at + len(closing)) if calls else None
    if closing.startswith(text[at:]):
        return Section(tuple(calls), None)
    return Section(tuple(calls), at) if calls else None


def _json_call(
    text: str, at: int, known: Schemas | None
) -> tuple[Call | None, int | None]:
    """Reads the call of a JSON object that begins at `at`.

    Returns:
      The call, and the index behind the object. (None, None) if the text ends before
      it is clear; (None, index) if the object is not a call.
    """
    end = _balanced(text, at)
    head = _JSON_HEAD.match(text, at, at + MAX_HEAD)
    if head is not None:
        name = head["name"]
        if known is not None and name not in known:
            return None, at
        inner = _balanced(text, head.end())
        return Call(name, strict(text[head.end() : inner])), end
    first = _FIRST_KEY.match(text, at)
    if known is not None and first is not None and first[1] not in CALL_KEYS:
        return None, at  # an answer in JSON: do not hold it back
    if end is None:
        return None, None
    try:
        fields = json.loads(text[at:end], strict=False)
    except (ValueError, RecursionError):
        return None, at
    name = fields.get("name", fields.get("tool_name"))
    given = fields.get("arguments", fields.get("parameters")) or {}
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        return None, at
    if known is not None and name not in known:
        return None, at
    own = given.encode("utf-8", "replace").decode() if isinstance(given, str) else ""
    own = own or dumped(given)
    return Call(name, own), end


def _balanced(text: str, at: int) -> int | None:
    """Returns the index behind the JSON object that begins at `at`, or None if the text
    ends within it."""
    depth = 0
    for token in _TOKENS.finditer(text, at):
        change = _DEPTH.get(token[0])
        if change is not None:
            depth += change
            if depth == 0:
                return token.end()
    return None


def strict(raw: str) -> str:
    """Returns JSON text whose strings have no unescaped control characters, which
    models write and JSON does not allow."""
    if _CONTROL.search(raw) is None:
        return raw
    return _TOKENS.sub(
        lambda token: _CONTROL.sub(lambda c: json.dumps(c[0])[1:-1], token[0]), raw
    )


def dumped(value: Any) -> str:
    """Returns a value as JSON, which UTF-8 can encode: lone surrogates, which a model
    may write as escapes, stay escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def skip(text: str, at: int, characters: str) -> int:
    """Returns the index of the first character from `at` on that is another one."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def one_by_one(
    text: str,
    at: int,
    head: re.Pattern[str],
    arguments: Callable[[int, str], tuple[str, int | None]],
    closing: str,
) -> Section | None:
    """Reads calls that begin with a pattern.

    Args:
      text: the text so far.
      at: index behind the text that opens calls.
      head: pattern of the text before the arguments, with a group `name`.
      arguments: reads the arguments of a named call from an index on. Returns them as
        JSON, and the index behind the call, or None if the text ends within it.
      closing: text behind all calls. If empty, there is one call.
    """
    calls: list[Call] = []
    while True:
        at = skip(text, at, SPACE)
        found = head.match(text, at, at + MAX_HEAD)
        if found is None:
            if calls and text.startswith(closing, at):
                return Section(tuple(calls), at + len(closing))
            if len(text) - at < MAX_HEAD:
                rest = None if closing.startswith(text[at:]) else at
                return Section(tuple(calls), None, rest)
            return Section(tuple(calls), at) if calls else None
        name = found["name"].strip()
        own, end = arguments(found.end(), name)
        calls.append(Call(name, own))
        if end is None or not closing:
            return Section(tuple(calls), end)
        at = end


@dataclass(frozen=True)
class NamedCalls:
    """A reader of calls whose name stands before their arguments in JSON.

    Attributes:
      head: pattern of the text before the arguments, with a group `name`.
      end: text behind the arguments of a call, or "".
      closing: text behind all calls. If empty, there is one call.
    """

    head: re.Pattern[str]
    end: str = ""
    closing: str = ""

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        def arguments(at: int, name: str) -> tuple[str, int | None]:
            inner = _balanced(text, at)
            own = strict(text[at:inner])
            if inner is None or not self.end:
                return own, inner
            at = skip(text, inner, SPACE)
            if text.startswith(self.end, at):
                return own, at + len(self.end)
            return own, None if self.end.startswith(text[at:]) else at

        return one_by_one(text, at, self.head, arguments, self.closing)


def without_beginning(text: str, *marks: str) -> str:
    """Returns a text without an end that begins one of the marks."""
    for size in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text
