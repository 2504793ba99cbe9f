"""Checks the form of JSON schemas: known keywords, values of the right kind, size."""

import math
from collections.abc import Callable
from typing import Any

from stree_jax.constraints.expressions import MAX_REPETITION, UnsupportedError
from stree_jax.constraints.formats import FORMATS

MAX_NODES = 100_000  # values in a schema
MAX_BITS = 4_096  # of an integer; Python does not write those of many thousand digits
MAX_DOCUMENT_DEPTH = 128  # nested objects and lists in a schema

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

# Keywords that say nothing about which values are valid. `discriminator` is OpenAPI's
# hint for a `oneOf`.
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly "
    "$schema $id $comment $defs definitions discriminator".split()
)
UNSUPPORTED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties unevaluatedItems contains minContains maxContains "
    "propertyNames patternProperties minProperties maxProperties additionalItems "
    "contentEncoding contentMediaType contentSchema $anchor $dynamicRef "
    "$dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary nullable".split()
)


class SchemaError(UnsupportedError):
    """A fault of a schema: its place and what to do."""


def refuse(path: str, message: str) -> SchemaError:
    """Returns the error of a fault at a JSON path."""
    return SchemaError(f"{path}: {message}")


def child(path: str, key: str | int) -> str:
    """Returns the JSON path of a member."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if _is_word(key) else f"{path}[{key[:60]!r}]"


def check_document(schema: Any) -> None:
    """Checks that a schema is JSON of bounded size.

    Raises:
      SchemaError: a value is not JSON, or the schema is too deep or too large.
    """
    todo, count = [(schema, "$", 0)], 0
    while todo:
        value, path, depth = todo.pop()
        count += 1
        if count > MAX_NODES:
            raise refuse("$", f"the schema has more than {MAX_NODES:,} values")
        if depth > MAX_DOCUMENT_DEPTH:
            raise refuse("$", "the schema is nested too deeply")
        if isinstance(value, dict):
            for key, member in value.items():
                if not isinstance(key, str):
                    raise refuse(path, f"the key {key!r:.60} is not a string")
                _check_text(key, path)
                todo.append((member, child(path, key), depth + 1))
        elif isinstance(value, list):
            todo += [(v, child(path, i), depth + 1) for i, v in enumerate(value)]
        elif isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise refuse(path, f"{value} is not a JSON number")
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise refuse(path, f"the number has more than {MAX_BITS:,} bits")
        elif not isinstance(value, int | None):
            raise refuse(path, f"a {type(value).__name__} is not a JSON value")


def check_keywords(schema: dict[str, Any], path: str) -> None:
    """Checks the keywords of one schema, without the schemas within it.

    Raises:
      SchemaError: a keyword is unsupported or has a value of the wrong kind.
    """
    for key, value in schema.items():
        place = child(path, key)
        if key in UNSUPPORTED:
            advice = "; write anyOf with null" if key == "nullable" else ""
            raise refuse(place, f"this keyword is not supported{advice}")
        if key == "$id" and path != "$":
            raise refuse(place, "this keyword is supported at the root only")
        if key in ANNOTATIONS:
            continue
        if key not in _CHECKS:
            raise refuse(place, "this keyword is unknown")
        accepts, wanted = _CHECKS[key]
        if not accepts(value):
            raise refuse(place, f"want {wanted}, got {value!r:.60}")
    if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
        place = child(path, "uniqueItems")
        raise refuse(place, "true is supported with maxItems 0 or 1 only")


def is_number(value: Any) -> bool:
    """True for a JSON number, which a Boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise refuse(path, "a string has half of a surrogate pair") from None


def _is_word(key: str) -> bool:
    return key.removeprefix("$").replace("-", "_").isidentifier()


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_count(value: Any) -> bool:
    return is_number(value) and value == int(value) and value >= 0


def _is_list(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _is_filled(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: bool(value) and _is_list(accepts)(value)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return _is_string(value) and value in TYPES


def _is_limit(value: Any) -> bool:
    return _is_count(value) and value <= MAX_REPETITION


_LIMIT = (_is_limit, f"an integer from 0 to {MAX_REPETITION:,}")
_SCHEMA = (_is_schema, "a schema")
_SCHEMAS = (_is_filled(_is_schema), "a list of schemas")
_NUMBER = (is_number, "a number")
_TEXT = (_is_string, "a string")

_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda value: _is_type(value) or _is_filled(_is_type)(value),
        f"one or a list of {', '.join(TYPES)}",
    ),
    "enum": (_is_filled(lambda value: True), "a list of values that is not empty"),
    "const": (lambda value: True, "a value"),
    "properties": (
        lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
        "an object of schemas",
    ),
    "required": (_is_list(_is_string), "a list of property names"),
    "additionalProperties": _SCHEMA,
    "items": (_is_schema, "a schema (prefixItems takes a list)"),
    "prefixItems": _SCHEMAS,
    "minItems": _LIMIT,
    "maxItems": _LIMIT,
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "minLength": _LIMIT,
    "maxLength": _LIMIT,
    "pattern": _TEXT,
    "format": (
        lambda value: _is_string(value) and value in FORMATS,
        f"one of {', '.join(FORMATS)}",
    ),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "multipleOf": (lambda value: is_number(value) and value > 0, "a positive number"),
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "$ref": _TEXT,
}
