"""Rules that a JSON value has to obey, and the combination of rules.

A schema with references and combinations is rewritten as alternatives, each of them one
`Rules` without any: `allOf` merges rules, `anyOf` and `oneOf` list alternatives.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from stree_jax.constraints.expressions import UnsupportedError
from stree_jax.constraints.keywords import TYPES, is_number
from stree_jax.constraints.numbers import Bounds, exact


class Subschema(NamedTuple):
    """A schema within a schema.

    Attributes:
      schema: the schema.
      path: its JSON path.
      refs: the references that were followed to come here.
      depth: number of schemas and references around it.
    """

    schema: Any
    path: str
    refs: tuple[tuple[str, ...], ...]
    depth: int


All = tuple[Subschema, ...]  # schemas that a value has to obey at the same time


class ImpossibleError(Exception):
    """Two rules exclude each other."""


@dataclass(frozen=True)
class Rules:
    """Rules for a value. A rule that is None does not exist.

    Attributes:
      types: the allowed types. "number" includes "integer", which is listed as well.
      values: the allowed values, of `enum` and `const`.
      bounds: the bounds of numbers.
      multiple_of: numbers are multiples of it.
      min_length, max_length: number of characters of strings.
      pattern, format: of strings.
      properties: the rules of named properties, in order.
      required: the properties that an object must have.
      additional: the rules of other properties; False if there must not be any.
      prefix: the rules of the first items of arrays.
      items: the rules of further items; False if there must not be any.
      min_items, max_items: number of items of arrays.
    """

    types: frozenset[str] | None = None
    values: tuple[Any, ...] | None = None
    bounds: Bounds = Bounds()
    multiple_of: Fraction | None = None
    min_length: int = 0
    max_length: int | None = None
    pattern: str | None = None
    format: str | None = None
    properties: dict[str, All] | None = None
    required: frozenset[str] = frozenset()
    additional: All | Literal[False] | None = None
    prefix: tuple[All, ...] = ()
    items: All | Literal[False] | None = None
    min_items: int = 0
    max_items: int | None = None

    def allowed_types(self) -> frozenset[str]:
        """Returns the types that valid values may have."""
        types = self.types or frozenset(TYPES)
        if self.values is None:
            return types
        return types & frozenset().union(*map(types_of, self.values))

    def written_types(self) -> frozenset[str]:
        """Returns the types that are written.

        Without `type` these are the types which the other rules are about, if any.
        """
        if self.types is not None or self.values is not None:
            return self.allowed_types()
        found: set[str] = set()
        if self.number_rules():
            found |= {"number", "integer"}
        if self.string_rules():
            found.add("string")
        if self.array_rules():
            found.add("array")
        if self.object_rules():
            found.add("object")
        return frozenset(found or TYPES)

    def number_rules(self) -> bool:
        """True if there is a rule for numbers."""
        return self.bounds != Bounds() or self.multiple_of is not None

    def string_rules(self) -> bool:
        """True if there is a rule for strings."""
        limits = self.min_length > 0 or self.max_length is not None
        return limits or self.pattern is not None or self.format is not None

    def array_rules(self) -> bool:
        """True if there is a rule for arrays."""
        limits = self.min_items > 0 or self.max_items is not None
        return limits or bool(self.prefix) or self.items is not None

    def object_rules(self) -> bool:
        """True if there is a rule for objects."""
        named = self.properties is not None or bool(self.required)
        return named or self.additional is not None


def types_of(value: Any) -> frozenset[str]:
    """Returns the types of a JSON value: a whole number is an integer and a number."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if is_number(value):
        whole = exact(value).denominator == 1
        return frozenset({"integer", "number"} if whole else {"number"})
    for kind, name in ((str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return frozenset({name})
    raise TypeError(f"not a JSON value: {value!r:.60}")


def key_of(value: Any) -> Any:
    """Returns a hashable key, equal for values that JSON schema takes for equal."""
    if isinstance(value, list):
        return ("array", *map(key_of, value))
    if isinstance(value, dict):
        return ("object", *sorted((k, key_of(v)) for k, v in value.items()))
    if is_number(value):
        return ("number", exact(value))
    return (type(value).__name__, value)


def merge(first: Rules, second: Rules) -> Rules:
    """Returns the rules of values that obey both.

    Raises:
      ImpossibleError: there are no such values.
      UnsupportedError: the rules cannot be merged.
    """
    types = _both(first.types, second.types, frozenset.intersection)
    values = _both(first.values, second.values, _common_values)
    if types == frozenset() or values == ():
        raise ImpossibleError
    multiple_of = _both(first.multiple_of, second.multiple_of, _common_multiple)
    b, c = first.bounds, second.bounds
    properties, required, additional = _merge_objects(first, second)
    prefix, items = _merge_items(first, second)
    return Rules(
        types=types,
        values=values,
        bounds=Bounds(
            low=_both(b.low, c.low, max),
            high=_both(b.high, c.high, min),
            above=_both(b.above, c.above, max),
            below=_both(b.below, c.below, min),
        ),
        multiple_of=multiple_of,
        min_length=max(first.min_length, second.min_length),
        max_length=_both(first.max_length, second.max_length, min),
        pattern=_both(first.pattern, second.pattern, _one("pattern")),
        format=_both(first.format, second.format, _one("format")),
        properties=properties,
        required=required,
        additional=additional,
        prefix=prefix,
        items=items,
        min_items=max(first.min_items, second.min_items),
        max_items=_both(first.max_items, second.max_items, min),
    )


def _both(first: Any, second: Any, combine: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return combine(first, second)


def _common_values(first: tuple, second: tuple) -> tuple:
    keys = set(map(key_of, second))
    return tuple(value for value in first if key_of(value) in keys)


def _common_multiple(first: Fraction, second: Fraction) -> Fraction:
    larger, smaller = max(first, second), min(first, second)
    if (larger / smaller).denominator == 1:
        return larger
    raise UnsupportedError("two values of multipleOf cannot be combined")


def _one(keyword: str) -> Any:
    def combine(first: str, second: str) -> str:
        if first != second:
            raise UnsupportedError(f"two values of {keyword} cannot be combined")
        return first

    return combine


def _merge_objects(first: Rules, second: Rules) -> tuple:
    required = first.required | second.required
    if first.properties is None and second.properties is None:
        properties = None
        names: Iterable[str] = ()
    else:
        properties = {}
        names = dict.fromkeys([*(first.properties or {}), *(second.properties or {})])
    for name in names:
        schemas: All | None = ()
        for rules in (first, second):
            own = (rules.properties or {}).get(name, rules.additional)
            if own is False:
                schemas = None  # the property must not occur
            elif own is not None and schemas is not None:
                schemas += own
        if schemas is not None:
            properties[name] = schemas
        elif name in required:
            raise ImpossibleError
    additional: All | Literal[False] | None
    if first.additional is False or second.additional is False:
        additional = False
    else:
        additional = _both(first.additional, second.additional, lambda a, b: a + b)
    return properties, required, additional


def _merge_items(first: Rules, second: Rules) -> tuple:
    prefix: list[All] = []
    for place in range(max(len(first.prefix), len(second.prefix))):
        schemas: All = ()
        for rules in (first, second):
            inside = place < len(rules.prefix)
            own = rules.prefix[place] if inside else rules.items
            if own is False:
                return tuple(prefix), False
            schemas += own or ()
        prefix.append(schemas)
    if first.items is False or second.items is False:
        return tuple(prefix), False
    return tuple(prefix), _both(first.items, second.items, lambda a, b: a + b)
