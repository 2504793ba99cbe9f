r"""Writes the regular expression of the JSON texts that are valid for a schema.

Every accepted text is valid. A keyword that is not enforced is refused, never ignored.
Texts have one form: no free white space, properties in the schema's order, and values
of `enum` and `const` as `json.dumps` writes them. In some places only a part of the
valid texts is accepted:

- Properties that the schema does not list are left out, unless `additionalProperties`
  is a schema. Items after `prefixItems` are left out unless `items` is given.
- Without `type`, a value has one of the types which the other keywords are about.
- Values without rules are nested to a bounded depth.
- Numbers and formats: see `stree_jax.constraints.numbers` and `.formats`. An integer is
  written without decimals and exponent.
- A property that is not listed, and text that a pattern matches, has only escapes
  that JSON demands.

The alternatives of an expression are in any order, so an engine must try all of them,
see `constraints.expression`.
"""

import re
from fractions import Fraction
from typing import Any

from stree_jax.common.checks import integer
from stree_jax.constraints.expressions import (
    MAX_LENGTH,
    MAX_SIZE,
    UnsupportedError,
    either,
    written_out_size,
)
from stree_jax.constraints.formats import format_regex
from stree_jax.constraints.keywords import SchemaError, child, refuse
from stree_jax.constraints.numbers import integer_regex, number_regex
from stree_jax.constraints.patterns import pattern_regex
from stree_jax.constraints.reading import Reader
from stree_jax.constraints.rules import All, Rules, types_of
from stree_jax.constraints.strings import (
    json_text,
    other_name_regex,
    string_regex,
    value_regex,
)
from stree_jax.constraints.structures import (
    ANY_DEPTH,
    any_object,
    any_value,
    array,
    separators,
)

JSON_DEPTH = 3  # nested objects and arrays of `json_mode_regex`: 2,402 states


def schema_regex(
    schema: Any, *, name: str = "json_schema", spaces: bool = False
) -> str:
    """Returns the regular expression of the JSON texts that are valid for a schema.

    Args:
      schema: a JSON schema, as `json.loads` returns it.
      name: name of the argument in error messages.
      spaces: if True, one space follows each comma and colon, as `json.dumps` writes.

    Raises:
      ValueError: the schema is malformed, too large, or has a keyword that is not
        supported. The message has the keyword's place.

    Example:
      >>> schema_regex({"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 2})
      '\\\\[(?:(?:"a"|1)(?:,(?:"a"|1))?)?\\\\]'
    """
    try:
        reader = Reader(schema)
        return _check_size(_Writer(reader, spaces).value(reader.root(), "$"), "$")
    except SchemaError as error:
        raise ValueError(f"{name}: {error}") from None


def json_mode_regex(depth: int = JSON_DEPTH, *, spaces: bool = False) -> str:
    """Returns the regular expression of JSON objects.

    Args:
      depth: number of nested objects and arrays, 1 to 4; 1 allows scalar members only.
      spaces: if True, one space follows each comma and colon.
    """
    depth = integer("depth", depth, 1, 4, "1..4 nested objects and arrays")
    return any_object(depth, *separators(spaces))


def _check_size(regex: str, path: str) -> str:
    """Returns an expression that is small enough for an automaton.

    Raises:
      SchemaError: the expression is too long, or would have too many states.
    """
    if len(regex) > MAX_LENGTH:
        raise refuse(path, f"the expression has more than {MAX_LENGTH:,} characters")
    try:
        size = written_out_size(regex)
    except UnsupportedError as error:
        raise refuse(path, str(error)) from None
    if size > MAX_SIZE:
        raise refuse(
            path,
            f"about {size:,} states are needed, more than {MAX_SIZE:,}; lower the "
            "limits of lengths and items",
        )
    return regex


class _Writer:
    """A writer of expressions for the schemas of one document."""

    def __init__(self, reader: Reader, spaces: bool) -> None:
        self.reader = reader
        self.spaces = spaces
        self.comma, self.colon = separators(spaces)

    def value(self, schemas: All, path: str) -> str:
        """Returns the expression of values that obey all schemas."""
        options: list[str] = []
        for rules in self.reader.alternatives(schemas) if schemas else [Rules()]:
            options += self.options(rules, schemas[0].path if schemas else path)
        if not options:
            raise refuse(path, "no value is valid")
        regex = either(options)
        if len(regex) > MAX_LENGTH:
            raise refuse(path, f"the expression has more than {MAX_LENGTH} characters")
        return regex

    def options(self, rules: Rules, path: str) -> list[str]:
        """Returns an expression for each type."""
        if rules.values is not None:
            return self.values(rules, path)
        types = rules.written_types()
        if rules == Rules():
            return [any_value(ANY_DEPTH, self.comma, self.colon)]
        try:
            options = ["null"] if "null" in types else []
            options += ["true", "false"] if "boolean" in types else []
            if "integer" in types:
                options.append(self.number(rules, whole="number" not in types))
            if "string" in types:
                options.append(self.string(rules, path))
            if "array" in types:
                options.append(self.array(rules, path))
            if "object" in types:
                options.append(self.object(rules, path))
        except SchemaError:
            raise
        except UnsupportedError as error:
            raise refuse(path, str(error)) from None
        return options

    def number(self, rules: Rules, *, whole: bool) -> str:
        """Returns the expression of numbers, or of integers if `whole`."""
        if rules.multiple_of is None:
            return (integer_regex if whole else number_regex)(rules.bounds)
        if rules.multiple_of.denominator != 1:
            raise UnsupportedError("multipleOf is supported with integers only")
        return integer_regex(rules.bounds, int(rules.multiple_of))

    def string(self, rules: Rules, path: str) -> str:
        """Returns the expression of strings."""
        low, high = rules.min_length, rules.max_length
        if high is not None and low > high:
            raise UnsupportedError("minLength is larger than maxLength")
        if rules.format is not None:
            if rules.pattern is not None or low > 0 or high is not None:
                raise refuse(
                    child(path, "format"),
                    "no pattern, minLength or maxLength is supported with a format",
                )
            try:
                return f'"{format_regex(rules.format)}"'
            except UnsupportedError as error:
                raise refuse(child(path, "format"), str(error)) from None
        if rules.pattern is None:
            return string_regex(low, high)
        try:
            regex = _check_size(f'"{pattern_regex(rules.pattern, low, high)}"', path)
            return regex
        except SchemaError:
            raise
        except UnsupportedError as error:
            raise refuse(child(path, "pattern"), str(error)) from None

    def array(self, rules: Rules, path: str) -> str:
        """Returns the expression of arrays."""
        low, high = rules.min_items, rules.max_items
        if high is not None and low > high:
            raise UnsupportedError("minItems is larger than maxItems")
        item = None
        if rules.items is False or (rules.items is None and rules.prefix):
            if low > len(rules.prefix):
                raise UnsupportedError(
                    f"minItems is {low}, but only {len(rules.prefix)} items are known; "
                    "give items as well"
                )
        elif high is None or high > len(rules.prefix):
            place = child(path, "items")
            item = self.member(rules.items or (), place)
        prefix = [
            self.member(schemas, child(child(path, "prefixItems"), i))
            for i, schemas in enumerate(rules.prefix[:high])
        ]
        return _check_size(array(prefix, item, low, high, self.comma), path)

    def member(self, schemas: All, path: str) -> str:
        """Returns the expression of a value in an array or object."""
        if not schemas:
            return any_value(ANY_DEPTH - 1, self.comma, self.colon)
        return self.value(schemas, path)

    def object(self, rules: Rules, path: str) -> str:
        """Returns the expression of objects."""
        properties = rules.properties or {}
        place = child(path, "properties")
        for name in sorted(rules.required):
            if name not in properties:
                raise refuse(
                    child(path, "required"),
                    f"{name!r:.60} is not one of the properties; list it there",
                )
        if (
            rules.properties is None
            and rules.additional is None
            or (not properties and rules.additional == ())
        ):
            return any_object(ANY_DEPTH, self.comma, self.colon)
        members = []
        for name, schemas in properties.items():
            key = value_regex(name) + self.colon
            member = key + self.member(schemas, child(place, name))
            members.append((member, name in rules.required))
        other = None
        if rules.additional:
            value = self.member(rules.additional, child(path, "additionalProperties"))
            other = other_name_regex(properties) + self.colon + value
        text = self.members(members, other)
        if len(text) > MAX_LENGTH:
            raise refuse(path, f"the expression has more than {MAX_LENGTH} characters")
        return rf"\{{{text}\}}"

    def members(self, members: list[tuple[str, bool]], other: str | None) -> str:
        """Returns the expression of members in order. Some are optional."""
        others = f"(?:{self.comma}{other})*" if other else ""
        first = next((i for i, (_, needed) in enumerate(members) if needed), None)
        if first is not None:
            before = "".join(f"(?:{text}{self.comma})?" for text, _ in members[:first])
            return (
                before + members[first][0] + self.after(members[first + 1 :]) + others
            )
        options = [self.some([text for text, _ in members]) + others] if members else []
        options += [other + others] if other else []
        return f"(?:{'|'.join(options)})?" if options else ""

    def after(self, members: list[tuple[str, bool]]) -> str:
        """Returns the expression of members that follow another one."""
        return "".join(
            self.comma + text if needed else f"(?:{self.comma}{text})?"
            for text, needed in members
        )

    def some(self, members: list[str]) -> str:
        """Returns the expression of at least one of the members, all of them optional.

        Halving the members keeps the expression short: n log n members for n of them.
        """
        if len(members) == 1:
            return members[0]
        half = len(members) // 2
        left, right = members[:half], members[half:]
        after = self.after([(text, False) for text in right])
        return f"(?:{self.some(left)}{after}|{self.some(right)})"

    def values(self, rules: Rules, path: str) -> list[str]:
        """Returns the expressions of the valid values of `enum` and `const`."""
        values = rules.values or ()
        if rules.array_rules() and any(isinstance(v, list) for v in values):
            raise refuse(path, "enum and const of arrays go with type only")
        if rules.object_rules() and any(isinstance(v, dict) for v in values):
            raise refuse(path, "enum and const of objects go with type only")
        if rules.string_rules() and any(isinstance(v, str) for v in values):
            text = re.compile(self.string(rules, path))
            strings = {v for v in values if isinstance(v, str)}
            valid = {v for v in strings if text.fullmatch(json_text(v))}
        else:
            valid = {v for v in values if isinstance(v, str)}
        found = []
        for value in values:
            if rules.types is not None and not types_of(value) & rules.types:
                continue
            if isinstance(value, str) and value not in valid:
                continue
            if types_of(value) & {"number"} and not _obeys(value, rules):
                continue
            found.append(value_regex(value, spaces=self.spaces))
        # Longer texts come first, for engines that take the first alternative.
        return sorted(found, key=len, reverse=True)


def _obeys(value: int | float, rules: Rules) -> bool:
    """True if a number is within the bounds and a multiple."""
    number = Fraction(value if isinstance(value, int) else repr(value))
    bounds = rules.bounds
    if bounds.low is not None and number < bounds.low:
        return False
    if bounds.high is not None and number > bounds.high:
        return False
    if bounds.above is not None and number <= bounds.above:
        return False
    if bounds.below is not None and number >= bounds.below:
        return False
    return rules.multiple_of is None or number % rules.multiple_of == 0
