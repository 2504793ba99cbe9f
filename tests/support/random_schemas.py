"""Draws random JSON schemas of the supported keywords."""

import json

import jsonschema

NAMES = ["a", "b", "name", "é", 'q"', "a b", "$x", ""]
VALUES = [None, True, False, 0, 1, 1.0, -2.5, "a", "b", 'q"\n', [], [1], {}, {"a": 1}]
FORMATS = "date time date-time duration uuid ipv4 ipv6 email hostname uri".split()
PATTERNS = [
    *("^[a-z]+$", "^a", "b$", "a.c", "^(foo|bar)-\\d{2,3}$", '^["\\\\/]{1,3}$'),
    *("^[^a-z]{2}$", "^\\w+@\\w+$", "x|^y$", "^\\u00e9?$", "^[A-F0-9]{4}(:[0-9]+)?$"),
]


def validator(schema):
    """Returns an independent validator."""
    # The plain `FormatChecker()` takes "time" in the sense of draft 3.
    draft = jsonschema.Draft202012Validator
    return draft(schema, format_checker=draft.FORMAT_CHECKER)


def random_schema(rng, depth=3):
    """Returns a random schema; `rng` is a `random.Random`."""
    schema = _value(rng, depth)
    if rng.random() < 0.3:
        schema = {"$ref": "#/$defs/one"} if rng.random() < 0.5 else _object(rng, depth)
        schema["$defs"] = {"one": _value(rng, depth - 1)}
        if "properties" in schema:
            schema["properties"]["ref"] = {"$ref": "#/$defs/one"}
    return json.loads(json.dumps(schema))


def _value(rng, depth):
    kinds = [_number, _integer, _string, _scalar, _values]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _combined, _any]
    return rng.choice(kinds)(rng, depth)


def _some(rng, options, share=0.4):
    return {key: value for key, value in options.items() if rng.random() < share}


def _number(rng, depth):
    low = rng.choice([rng.randint(-50, 50), round(rng.uniform(-20, 20), 2), 0.1])
    high = low + rng.choice([0, 1, 5, 0.25, 1000])
    names = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    return {
        "type": rng.choice(["number", "number", "integer", ["number", "null"]]),
        **_some(rng, {rng.choice(names[0]): low, rng.choice(names[1]): round(high, 3)}),
    }


def _integer(rng, depth):
    low = rng.randint(-1200, 1200)
    return {
        "type": "integer",
        **_some(rng, {"minimum": low, "maximum": low + rng.choice([0, 9, 77, 12345])}),
        **_some(rng, {"multipleOf": rng.choice([1, 2, 5, 10, 25, 7])}, 0.2),
    }


def _string(rng, depth):
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind < 0.6:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randint(0, 5)
    limits = {"minLength": low, "maxLength": low + rng.randint(0, 30)}
    return {"type": "string", **_some(rng, limits)}


def _scalar(rng, depth):
    return {"type": rng.choice(["null", "boolean", "string", ["boolean", "null"]])}


def _values(rng, depth):
    if rng.random() < 0.4:
        return {"const": rng.choice(VALUES)}
    values = {"enum": rng.sample(VALUES, rng.randint(1, 5))}
    return values | _some(rng, {"type": ["number", "string", "null"]}, 0.2)


def _any(rng, depth):
    return rng.choice([True, {}, {"type": "object"}, {"type": "array"}, {"title": "x"}])


def _array(rng, depth):
    schema = {"type": rng.choice(["array", ["array", "null"]])}
    prefix = [_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    items = rng.choice([_value(rng, depth - 1), _value(rng, depth - 1), False])
    schema |= _some(rng, {"prefixItems": prefix}, 0.3)
    schema |= _some(rng, {"items": items}, 0.8)
    low = rng.randint(0, 3)
    schema |= _some(rng, {"minItems": low, "maxItems": low + rng.randint(0, 4)})
    return schema


def _object(rng, depth):
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }
    others = rng.choice([False, False, True, _value(rng, depth - 1)])
    return schema | _some(rng, {"additionalProperties": others}, 0.6)


def _combined(rng, depth):
    kind = rng.choice(["anyOf", "anyOf", "oneOf", "tagged", "allOf", "beside"])
    if kind in ("anyOf", "oneOf"):
        return {kind: [_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "tagged":
        options = [_object(rng, depth - 1) for _ in range(2)]
        for tag, option in zip("xy", options, strict=True):
            option["properties"]["kind"] = {"const": tag}
            option["required"].append("kind")
        return {"oneOf": options}
    if kind == "allOf":
        return {"allOf": [_object(rng, depth - 1), _object(rng, depth - 1)]}
    return _object(rng, depth - 1) | {"anyOf": [_object(rng, depth - 1), {}]}


def closed_schema(rng, depth=3):
    """Returns a schema whose expression accepts all valid values.

    Values are compared in the fixed form, with properties in the schema's order.
    """
    kinds = ["integer", "string", "enum", "pattern", "null"]
    if depth > 0:
        kinds += ["object", "object", "array", "array", "anyOf", "tuple"]
    kind = rng.choice(kinds)
    low = rng.randint(0, 3)

    def inner():
        return closed_schema(rng, depth - 1)

    if kind == "integer":
        low = rng.randint(-120, 120)
        limits = {"minimum": low, "exclusiveMaximum": low + rng.choice([1, 10, 100])}
        return {"type": "integer", **_some(rng, limits, 0.7)}
    if kind == "string":
        limits = {"minLength": low, "maxLength": low + rng.randint(0, 3)}
        return {"type": "string", **_some(rng, limits)}
    if kind == "enum":
        return {"enum": ["a", None, True, 7]}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^a+z?$", "z", "^(aa)*$"])}
    if kind == "object":
        names = ["a", "b", "c", "d"][: rng.randint(0, 4)]
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": [name for name in names if rng.random() < 0.4],
            "additionalProperties": False,
        }
    if kind == "array":
        limits = {"minItems": low, "maxItems": low + rng.randint(0, 3)}
        return {"type": "array", "items": inner(), **_some(rng, limits)}
    if kind == "tuple":
        prefix = [inner() for _ in range(rng.randint(1, 3))]
        limits = {"minItems": rng.randint(0, len(prefix)), "maxItems": 3}
        return {
            "type": "array",
            "prefixItems": prefix,
            "items": rng.choice([False, inner()]),
            **_some(rng, limits),
        }
    if kind == "anyOf":
        return {"anyOf": [inner(), inner()]}
    return {"type": "null"}
