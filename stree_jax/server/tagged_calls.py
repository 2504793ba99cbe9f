"""Reads tool calls that have a tag for each parameter."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stree_jax.server.calls import (
    MAX_HEAD,
    SPACE,
    Schemas,
    Section,
    dumped,
    one_by_one,
    skip,
    without_beginning,
)


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
      closing: text behind all calls. If empty, there is one call.
      last: text at the end of a value that does not belong to it.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    end: str
    closing: str = ""
    last: str = "\n"

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        def arguments(at: int, name: str) -> tuple[str, int | None]:
            return self._parameters(text, at, schemas.get(name, {}))

        return one_by_one(text, at, self.head, arguments, self.closing)

    def _parameters(
        self, text: str, at: int, schemas: Mapping[str, Any]
    ) -> tuple[str, int | None]:
        """Returns the arguments as JSON, and the index behind the call, or None if the
        text ends within it."""
        found = "{"
        while True:
            at = skip(text, at, SPACE)
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
                begun = without_beginning(value, self.last + self.value_end)
                begun = without_beginning(begun, self.value_end)
                begun = begun.removeprefix("\n")
                is_text = kinds == {"string"}
                return found + (dumped(begun)[:-1] if is_text else ""), None
            found += _value(value.removesuffix(self.last).removeprefix("\n"), kinds)
            at = end + len(self.value_end)


def _kinds(schema: Any, depth: int = 4) -> set[str]:
    """Returns the JSON types that a schema allows; empty if they are unknown.

    Args:
      schema: the schema, which may be malformed.
      depth: levels of anyOf and oneOf that are read.
    """
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    found = {k for k in _listed(kinds) if isinstance(k, str)}
    for name in ("anyOf", "oneOf"):
        several = schema.get(name)
        for one in several if isinstance(several, list) and depth else ():
            found |= _kinds(one, depth - 1)
    if not found and isinstance(schema.get("enum"), list):
        found = {_kind_of(value) for value in schema["enum"]}
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
        value = text if "string" in kinds else _python_value(text)
    kind = _kind_of(value)
    allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return dumped(text if "string" in kinds and not allowed else value)


def _python_value(text: str) -> Any:
    """Returns the value of a Python literal, which some templates write, or the text if
    it is not one that JSON can represent."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def _refuse(name: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(name)
