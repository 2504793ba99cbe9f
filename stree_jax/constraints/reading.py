"""Reads JSON schemas as alternatives of rules, see `stree_jax.constraints.rules`."""

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any
from urllib.parse import unquote

from stree_jax.constraints.expressions import UnsupportedError
from stree_jax.constraints.keywords import (
    SchemaError,
    check_document,
    check_keywords,
    child,
    refuse,
)
from stree_jax.constraints.numbers import Bounds, exact
from stree_jax.constraints.rules import (
    All,
    ImpossibleError,
    Rules,
    Subschema,
    key_of,
    merge,
    types_of,
)

MAX_DEPTH = 64  # nested schemas and references
MAX_ALTERNATIVES = 200  # of one value, after combinations are written out
MAX_VISITS = 20_000  # schemas that are read, each once for every use


class Reader:
    """A reader of the schemas within one document.

    Args:
      document: the whole schema, into which references point.

    Raises:
      SchemaError: the document is not JSON, or too large.
    """

    def __init__(self, document: Any) -> None:
        check_document(document)
        self.document = document
        self.visits = 0

    def root(self) -> All:
        """Returns the whole schema."""
        if not isinstance(self.document, dict | bool):
            raise refuse("$", f"want a schema, got {self.document!r:.60}")
        return (Subschema(self.document, "$", (), 0),)

    def alternatives(self, schemas: All) -> list[Rules]:
        """Returns alternative rules for all of the schemas. A value has to obey one.

        Raises:
          SchemaError: a schema is malformed or unsupported, or there is no such value.
        """
        path = schemas[0].path if schemas else "$"
        found = self.combine([self.read(schema) for schema in schemas], path)
        if not found:
            raise refuse(path, "no value is valid")
        return found

    def combine(self, parts: Iterable[list[Rules]], path: str) -> list[Rules]:
        """Returns the alternatives of values that obey one alternative of each part."""
        found = [Rules()]
        for part in parts:
            merged = []
            for first, second in product(found, part):
                try:
                    merged.append(merge(first, second))
                except ImpossibleError:
                    continue
                except SchemaError:
                    raise
                except UnsupportedError as error:
                    raise refuse(path, str(error)) from None
            if len(merged) > MAX_ALTERNATIVES:
                raise refuse(path, f"more than {MAX_ALTERNATIVES} alternatives")
            found = merged
        return found

    def read(self, sub: Subschema) -> list[Rules]:
        """Returns the alternatives of one schema."""
        schema, path = sub.schema, sub.path
        self.visits += 1
        if self.visits > MAX_VISITS:
            raise refuse(path, "the schema is too large with references written out")
        if sub.depth > MAX_DEPTH:
            raise refuse(path, f"more than {MAX_DEPTH} schemas are nested")
        if schema is True:
            return [Rules()]
        if schema is False:
            raise refuse(path, "the schema false accepts no value")
        check_keywords(schema, path)
        own = [self.own_rules(sub)]
        if "oneOf" in schema:
            own = self.exclusive(sub, own)
        parts = [own]
        if "$ref" in schema:
            parts.append(self.read(self.target(sub)))
        for member in self.members(sub, "allOf"):
            parts.append(self.read(member))
        if "anyOf" in schema:
            options = [self.read(member) for member in self.members(sub, "anyOf")]
            parts.append([rules for option in options for rules in option])
        return self.combine(parts, path)

    def members(self, sub: Subschema, key: str) -> list[Subschema]:
        """Returns the schemas in the list of a keyword."""
        path = child(sub.path, key)
        return [
            Subschema(member, child(path, i), sub.refs, sub.depth + 1)
            for i, member in enumerate(sub.schema.get(key, ()))
        ]

    def one(self, sub: Subschema, key: str) -> All:
        """Returns the schema of a keyword, empty for one that accepts every value."""
        member = sub.schema[key]
        if member is True or member == {}:
            return ()
        return (Subschema(member, child(sub.path, key), sub.refs, sub.depth + 1),)

    def target(self, sub: Subschema) -> Subschema:
        """Returns the schema that a reference points to."""
        ref, path = sub.schema["$ref"], child(sub.path, "$ref")
        if ref != "#" and not ref.startswith("#/"):
            raise refuse(path, f"want a reference within the schema, got {ref!r:.60}")
        steps = tuple(
            step.replace("~1", "/").replace("~0", "~")
            for step in unquote(ref).split("/")[1:]
        )
        place, at = self.document, "$"
        for step in steps:
            if isinstance(place, list) and step.isascii() and step.isdigit():
                key: str | int = int(step) if len(step) < 9 else len(place)
                inside = int(key) < len(place)
            else:
                key, inside = step, isinstance(place, dict) and step in place
            if not inside:
                raise refuse(path, f"{ref!r:.60} does not exist")
            place, at = place[key], child(at, key)
        if not isinstance(place, dict | bool):
            raise refuse(path, f"{ref!r:.60} is not a schema")
        if steps in sub.refs:
            raise refuse(path, f"{ref!r:.60} is recursive, which is not supported")
        return Subschema(place, at, (*sub.refs, steps), sub.depth + 1)

    def own_rules(self, sub: Subschema) -> Rules:
        """Returns the rules of a schema's own keywords."""
        schema, path = sub.schema, sub.path
        for low, high in (
            *(("minimum", "maximum"), ("minLength", "maxLength")),
            ("minItems", "maxItems"),
        ):
            if low in schema and high in schema and schema[low] > schema[high]:
                raise refuse(child(path, low), f"the value is larger than {high}")

        def number(key: str) -> Any:
            return exact(schema[key]) if key in schema else None

        def count(key: str) -> int | None:
            return int(schema[key]) if key in schema else None

        properties: dict[str, All] | None = None
        if "properties" in schema:
            place, properties = child(path, "properties"), {}
            for name, member in schema["properties"].items():
                at = child(place, name)
                properties[name] = (Subschema(member, at, sub.refs, sub.depth + 1),)
        closed = {
            key: False if schema[key] is False else self.one(sub, key)
            for key in ("additionalProperties", "items")
            if key in schema
        }
        prefix = tuple((m,) for m in self.members(sub, "prefixItems"))
        return Rules(
            types=_types(schema.get("type")),
            values=_values(schema, path),
            bounds=Bounds(
                number("minimum"),
                number("maximum"),
                number("exclusiveMinimum"),
                number("exclusiveMaximum"),
            ),
            multiple_of=number("multipleOf"),
            min_length=count("minLength") or 0,
            max_length=count("maxLength"),
            pattern=schema.get("pattern"),
            format=schema.get("format"),
            properties=properties,
            required=frozenset(schema.get("required", ())),
            additional=closed.get("additionalProperties"),  # type: ignore[arg-type]
            prefix=prefix,
            items=closed.get("items"),  # type: ignore[arg-type]
            min_items=count("minItems") or 0,
            max_items=count("maxItems"),
        )

    def exclusive(self, sub: Subschema, own: list[Rules]) -> list[Rules]:
        """Returns the alternatives of `oneOf`, merged with the schema's own rules.

        Types are fixed here: with further types, which rules around the schema may
        list, a value could obey two alternatives.
        """
        path = child(sub.path, "oneOf")
        members = self.members(sub, "oneOf")
        options = [self.combine([own, self.read(member)], path) for member in members]
        self.check_apart(options, path)
        return [
            dataclasses.replace(rules, types=rules.written_types())
            for option in options
            for rules in option
        ]

    def check_apart(self, options: list[list[Rules]], path: str) -> None:
        """Checks that no value which is written for one option is valid for another."""
        for i, first in enumerate(options):
            for j, second in enumerate(options[:i]):
                for a, b in product(first, second):
                    apart = self.apart(a, b, a.written_types() & b.allowed_types())
                    if not apart or not self.apart(
                        b, a, b.written_types() & a.allowed_types()
                    ):
                        raise refuse(
                            path,
                            f"the alternatives {j} and {i} may both be valid; give "
                            "them other types, or a required property with other "
                            "values of const, or write anyOf",
                        )

    def apart(self, a: Rules, b: Rules, types: frozenset[str]) -> bool:
        """True if it is certain that no value of these types obeys both rules."""
        if not types:
            return True
        if a.values is not None and b.values is not None:
            return set(map(key_of, a.values)).isdisjoint(map(key_of, b.values))
        if types != {"object"}:
            return False
        for name in sorted(a.required | b.required):
            own = [(r.properties or {}).get(name, r.additional) for r in (a, b)]
            if own[0] is False or own[1] is False:
                return True
            if own[0] and own[1] and self.schemas_apart(own[0], own[1]):
                return True
        return False

    def schemas_apart(self, first: All, second: All) -> bool:
        """True if it is certain that no value obeys the schemas of both."""
        return all(
            self.apart(a, b, a.allowed_types() & b.allowed_types())
            for a, b in product(self.alternatives(first), self.alternatives(second))
        )


def _types(value: str | list[str] | None) -> frozenset[str] | None:
    if value is None:
        return None
    types = {value} if isinstance(value, str) else set(value)
    return frozenset(types | {"integer"} if "number" in types else types)


def _values(schema: dict[str, Any], path: str) -> tuple[Any, ...] | None:
    """Returns the values of `enum` and `const`, each of them once."""
    if "const" not in schema and "enum" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "const" in schema:
        values = [v for v in values if key_of(v) == key_of(schema["const"])]
    types = _types(schema.get("type"))
    if types is not None:
        values = [v for v in values if types_of(v) & types]
    if not values:
        raise refuse(path, "no value of enum or const is valid")
    return tuple({key_of(v): v for v in reversed(values)}.values())[::-1]
