"""Reads tool calls in generated text. Each reader is a pure function of a text.

A reader gets the text so far and the index behind the text that opens calls. Longer
texts only add calls, or text to the arguments of the last one, so that a stream can
show the difference between two results.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Maximum characters of the text before the arguments of a call. A longer text without
# arguments is not a call.
MAX_HEAD = 512
TOOL_NAME = r"[A-Za-z0-9_.\-]+"

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
    """

    calls: tuple[Call, ...]
    end: int | None


# A reader returns None if the text cannot be a call.
Read = Callable[[str, int, Schemas], Section | None]

_SPACE = re.compile(r"\s*")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|[{}\[\]]', re.S)
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
            at = _skip(text, at, " \t\r\n,;[]")
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
    if not isinstance(name, str) or (known is not None and name not in known):
        return None, at
    own = given if isinstance(given, str) else dumped(given)
    return Call(name, own), end


def _balanced(text: str, at: int) -> int | None:
    """Returns the index behind the JSON object that begins at `at`, or None if the text
    ends within it."""
    depth = 0
    for token in _TOKENS.finditer(text, at):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
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
    return json.dumps(value, ensure_ascii=False)


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


@dataclass(frozen=True)
class NamedCalls:
    """A reader of calls whose name stands before their arguments in JSON.

    Attributes:
      head: pattern of the text before the arguments, with a group `name`.
      end: text behind the arguments of a call, or "".
      closing: text behind all calls, or "".
    """

    head: re.Pattern[str]
    end: str = ""
    closing: str = ""

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        calls: list[Call] = []
        while True:
            at = _skip(text, at, " \t\r\n")
            head = self.head.match(text, at, at + MAX_HEAD)
            if head is None:
                if calls and (self.closing == "" or text.startswith(self.closing, at)):
                    return _closed(text, at, calls, self.closing)
                if len(text) - at < MAX_HEAD:
                    return Section(tuple(calls), None)
                return Section(tuple(calls), at) if calls else None
            inner = _balanced(text, head.end())
            calls.append(Call(head["name"], strict(text[head.end() : inner])))
            if inner is None:
                return Section(tuple(calls), None)
            at = _skip(text, inner, " \t\r\n") if self.end else inner
            if self.end and not text.startswith(self.end, at):
                return _closed(text, at, calls, self.end)
            at += len(self.end)
            if not self.closing:
                return Section(tuple(calls), at)


@dataclass(frozen=True)
class TaggedCalls:
    """A reader of calls with a tag for each parameter. The tools' schemas say which
    values are texts; others are JSON.

    Attributes:
      head: pattern of the text before the parameters, with a group `name`.
      key: pattern of the text before a value, with a group `key`, and perhaps a group
        `text` that is "true" if the value is a text.
      value_end: text behind a value.
      end: text behind the parameters of a call.
      closing: text behind all calls, or "".
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    end: str
    closing: str = ""

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        calls: list[Call] = []
        while True:
            at = _skip(text, at, " \t\r\n")
            head = self.head.match(text, at, at + MAX_HEAD)
            if head is None:
                if calls and (not self.closing or text.startswith(self.closing, at)):
                    return _closed(text, at, calls, self.closing)
                if len(text) - at < MAX_HEAD:
                    return Section(tuple(calls), None)
                return Section(tuple(calls), at) if calls else None
            name = head["name"].strip()
            own = schemas.get(name, {})
            arguments, end = self._parameters(text, head.end(), own)
            calls.append(Call(name, arguments))
            if end is None:
                return Section(tuple(calls), None)
            at = end
            if not self.closing:
                return Section(tuple(calls), at)

    def _parameters(
        self, text: str, at: int, schemas: Mapping[str, Any]
    ) -> tuple[str, int | None]:
        """Returns the arguments as JSON, and the index behind the call, or None if the
        text ends within it."""
        found = "{"
        while True:
            at = _skip(text, at, " \t\r\n")
            if text.startswith(self.end, at):
                return found + "}", at + len(self.end)
            key = self.key.match(text, at, at + MAX_HEAD)
            if key is None:
                if len(text) - at < MAX_HEAD:
                    return found, None
                return found + "}", at  # another text: the call ends here
            comma = "" if found == "{" else ", "
            found += f"{comma}{dumped(key['key'].strip())}: "
            end = text.find(self.value_end, key.end())
            value = text[key.end() : None if end < 0 else end]
            marked = key.groupdict().get("text")
            schema = schemas.get(key["key"].strip())
            kinds = _kinds(schema)
            if marked is not None:
                kinds = {"string"} if marked == "true" else set()
            if end < 0:
                begun = without_beginning(value, f"\n{self.value_end}")
                begun = without_beginning(begun, self.value_end)
                begun = begun.removeprefix("\n")
                is_text = kinds == {"string"}
                return found + (dumped(begun)[:-1] if is_text else ""), None
            found += _value(value.removeprefix("\n").removesuffix("\n"), kinds)
            at = end + len(self.value_end)


def without_beginning(text: str, *marks: str) -> str:
    """Returns a text without an end that begins one of the marks."""
    for size in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text


def _kinds(schema: Any) -> set[str]:
    """Returns the JSON types that a schema allows; empty if they are unknown."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    found = set(kind if isinstance(kind, list) else [kind] if kind else [])
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name) or ():
            found |= _kinds(one)
    if not found and isinstance(schema.get("enum"), list):
        found = {_kind_of(value) for value in schema["enum"]}
    return found


def _kind_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    for kind, name in (
        (bool, "boolean"),
        (str, "string"),
        (int, "integer"),
        (float, "number"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "null"


def _value(text: str, kinds: set[str]) -> str:
    """Returns the value of a parameter as JSON.

    Args:
      text: the text of the value.
      kinds: the JSON types that its schema allows. If "string" is one of them, a text
        that is JSON of another allowed type has that type. If empty, every type is
        allowed.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
        if "string" not in kinds:
            value = {"True": True, "False": False, "None": None}.get(text, text)
    kind = _kind_of(value)
    allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return dumped(text if "string" in kinds and not allowed else value)


def _refuse(name: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(name)


@dataclass(frozen=True)
class PythonCalls:
    """A reader of a Python list of calls, [f(a='x'), g(b=1)].

    Attributes:
      closing: text behind the list.
    """

    closing: str

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        end = text.find(self.closing, at)
        if end < 0:  # a longer text may change the last call
            return Section((), None)
        try:
            tree = ast.parse(text[at:end].strip(), mode="eval").body
            calls = [_python_call(node) for node in getattr(tree, "elts", [tree])]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return Section(tuple(calls), end + len(self.closing))


def _python_call(node: ast.AST | None) -> Call:
    """Returns the call of a Python expression; raises ValueError or TypeError if it is
    not a call with JSON values."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {k.arg: ast.literal_eval(_with_names(k.value)) for k in node.keywords}
    if None in values:
        raise ValueError("unpacked arguments")
    return Call(ast.unparse(node.func), dumped(values))


class _Names(ast.NodeTransformer):
    """Replaces JSON's constants, which are names in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        if node.id not in constants:
            raise ValueError(f"{node.id} is not a value")
        return ast.Constant(constants[node.id])


def _with_names(node: ast.expr) -> ast.expr:
    found: ast.expr = _Names().visit(node)
    return found


@dataclass(frozen=True)
class BracedCalls:
    """A reader of calls such as call:f{a:<|"|>x<|"|>,b:1}.

    Attributes:
      quote: text around strings.
      closing: text behind the call.
    """

    quote: str
    closing: str

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        end = text.find(self.closing, at)
        if end < 0:
            return Section((), None)
        head = re.compile(rf"\s*call:({TOOL_NAME})").match(text, at, end)
        if head is None:
            return None
        parts = text[head.end() : end].strip().split(self.quote)
        for i, part in enumerate(parts):
            key = r'([{,]\s*)([^\s{},:"\[\]]+)\s*:'
            parts[i] = dumped(part) if i % 2 else re.sub(key, r'\1"\2":', part)
        try:
            call = Call(head[1], dumped(json.loads("".join(parts))))
        except (ValueError, RecursionError):
            return None
        return Section((call,), end + len(self.closing))
