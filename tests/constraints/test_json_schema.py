"""JSON schemas as regular expressions: each accepted text is valid."""

import copy
import doctest
import importlib
import json
import random
import re

import pytest

from stree_jax.constraints.json_schema import json_mode_regex, schema_regex
from tests.support.random_schemas import VALUES, closed_schema, random_schema, validator
from tests.support.regex_samples import matches, sample

SCHEMAS = 200  # random schemas; 2,000 take a minute
TEXTS = 8  # texts of each

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NULL = {"type": "null"}


def text_of(value, spaces=False):
    separators = (", ", ": ") if spaces else (",", ":")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def record(properties, **more):
    return {"type": "object", "properties": properties, **more}


def test_texts_of_random_schemas_are_valid():
    written = 0
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            regex = schema_regex(schema, spaces=rng.random() < 0.5)
        except ValueError as error:
            assert re.fullmatch(r"json_schema: \$.*: .+", str(error)), str(error)
            continue
        written += 1
        check = validator(schema)
        for _ in range(TEXTS):
            text = sample(regex, rng)
            errors = [error.message for error in check.iter_errors(json.loads(text))]
            assert not errors, (seed, schema, text, errors)
    assert written > 0.8 * SCHEMAS


def changed(value, rng):
    """Returns a value with one random change."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        if rng.random() < 0.4:
            del value[name]
        else:
            value[name] = changed(value[name], rng)
        return value
    if isinstance(value, list) and rng.random() < 0.8:
        place = rng.randint(0, len(value))
        if place == len(value) or rng.random() < 0.3:
            return value[:place] + [rng.choice([*value, 0])] + value[place:]
        if rng.random() < 0.4:
            return value[:place] + value[place + 1 :]
        value[place] = changed(value[place], rng)
        return value
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.8:
        return value + rng.choice([-100, -10, -1, 1, 10, 100])
    if isinstance(value, str) and rng.random() < 0.8:
        return rng.choice([value[1:], value + "z", value * 2])
    return rng.choice(VALUES)


def has_whole_float(value):
    """True if a value holds a number such as 1.0, which is never written for 1."""
    members = value if isinstance(value, list) else []
    members = value.values() if isinstance(value, dict) else members
    return isinstance(value, float) or any(map(has_whole_float, members))


def test_texts_are_accepted_if_and_only_if_they_are_valid():
    """Schemas in which every rule can be written exactly."""
    counts = {True: 0, False: 0}
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        schema = closed_schema(rng)
        regex = re.compile(schema_regex(schema))
        check = validator(schema)
        value = json.loads(sample(regex.pattern, rng))
        for _ in range(20):
            other = changed(value, rng)
            if has_whole_float(other):
                continue
            valid = check.is_valid(other)
            accepted = regex.fullmatch(text_of(other)) is not None
            assert accepted == valid, (seed, schema, other)
            counts[valid] += 1
            value = other if valid else value
    assert min(counts.values()) > SCHEMAS


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (
            record({"a": INTEGER, "b": STRING, "c": NULL}, required=["b"]),
            ['{"b":""}', '{"a":-1,"b":"x"}', '{"a":0,"b":"x","c":null}'],
            ["{}", '{"a":1}', '{"b":"x","a":1}', '{"b":"x",}', '{"b": "x"}', '{"b":1}'],
        ),
        (
            record({"a": NULL, "b": NULL, "c": NULL}),
            ["{}", '{"a":null}', '{"c":null}', '{"a":null,"c":null}'],
            ['{,"a":null}', '{"b":null,"a":null}', '{"a":null,"a":null}'],
        ),
        (
            record({"a": INTEGER}, additionalProperties={"type": "boolean"}),
            ["{}", '{"a":1}', '{"a":1,"b":true}', '{"ab":true,"":false}'],
            ['{"a":true}', '{"b":true,"a":true}', '{"b":1}', '{"\\u0061":true}'],
        ),
        (
            {"type": "object", "additionalProperties": INTEGER},
            ["{}", '{"x":1}', '{"x":1,"é":2}'],
            ['{"x":null}', "[]"],
        ),
        (record({}), ["{}"], ['{"a":1}']),
        ({"type": "object"}, ["{}", '{"a":[1e-7]}'], ["[]", '{"a":[[1]]}']),
        ({"type": "array", "items": NULL, "maxItems": 0}, ["[]"], ["[null]"]),
        (
            {"items": NULL, "minItems": 2, "maxItems": 3},
            ["[null,null]", "[null,null,null]"],
            ["[null]", "[null,null,null,null]", "[null, null]", "null"],
        ),
        (
            {"prefixItems": [INTEGER, STRING], "items": NULL, "minItems": 1},
            ["[1]", '[1,"a"]', '[1,"a",null,null]'],
            ["[]", "[null]", "[1,null]"],
        ),
        ({"prefixItems": [NULL], "items": False}, ["[]", "[null]"], ["[null,null]"]),
        (
            {"type": "string", "minLength": 1, "maxLength": 2},
            ['"a"', '"😀é"', r'"\u00e9\n"', r'"\ud83d\ude00\/"', '"\\""'],
            ['""', '"abc"', r'"\ud83d"', r'"\ude00\ud83d"', '"\n"', '"\x7f"', r'"\x"'],
        ),
        (
            {"enum": [1, "a", None, [1, {}]]},
            ["1", '"a"', "null", "[1,{}]"],
            ["2", "1.0"],
        ),
        ({"const": {"b": 'q"', "a": "\x7f"}}, [r'{"b":"q\"","a":"\u007f"}'], ["{}"]),
        ({"enum": [1, 2, "a", 9], "type": "number", "minimum": 2}, ["2", "9"], ["1"]),
        ({"enum": ["ab", "b", 1], "pattern": "^a"}, ['"ab"', "1"], ['"b"']),
        ({"type": ["integer", "null"]}, ["1", "null"], ["1.5", '"a"']),
        ({"anyOf": [INTEGER, NULL]}, ["-3", "null"], ["-0", "01", "+1", "1.0", "1e2"]),
        ({"oneOf": [INTEGER, NULL]}, ["7", "null"], ["true"]),
        (
            {"allOf": [{"type": "number", "minimum": 3}, {"maximum": 5}, INTEGER]},
            ["3", "4", "5"],
            ["2", "6", "4.5"],
        ),
        (
            {"allOf": [STRING | {"maxLength": 2}, {"minLength": 1, "maxLength": 9}]},
            ['"a"', '"ab"'],
            ['""', '"abc"'],
        ),
        (
            {
                "type": "array",
                "allOf": [
                    {"prefixItems": [{"minimum": 1}, NULL], "maxItems": 3},
                    {"items": {"type": ["integer", "null"]}, "minItems": 1},
                    {"prefixItems": [{"maximum": 2}], "maxItems": 7},
                ],
            },
            ["[1]", "[2,null]", "[1,null,null]", "[1,null,5]"],
            ["[]", "[0]", "[3]", "[1,1]", "[1,null,5,5]"],
        ),
        (
            {"allOf": [{"enum": [1, "a", None]}, {"enum": ["a", 1.0, 2]}]},
            ["1", '"a"'],
            ["null", "2", "1.0"],
        ),
        (
            {
                "type": "integer",
                "allOf": [
                    {"minimum": 2, "exclusiveMaximum": 9, "multipleOf": 2},
                    {"exclusiveMinimum": 2, "maximum": 30, "multipleOf": 4},
                ],
            },
            ["4", "8"],
            ["2", "6", "12", "0"],
        ),
        (
            {
                "allOf": [
                    record({"a": INTEGER}, additionalProperties=False),
                    record({"b": INTEGER, "a": {"minimum": 1}}),
                ]
            },
            ["{}", '{"a":1}'],
            ['{"b":1}', '{"a":0}'],
        ),
        (
            {
                "$defs": {"n": {"type": "integer", "minimum": 0}},
                **record({"n": {"$ref": "#/$defs/n", "maximum": 9}}, required=["n"]),
            },
            ['{"n":9}'],
            ['{"n":10}', '{"n":-1}', "{}"],
        ),
        (
            {
                "allOf": [
                    record({"a": INTEGER}, required=["a"]),
                    record({"b": STRING, "a": {"minimum": 5}}, required=["b"]),
                ]
            },
            ['{"a":5,"b":""}'],
            ['{"a":4,"b":""}', '{"a":5}', '{"b":""}'],
        ),
        (
            record(
                {"a": NULL, "b": NULL},
                anyOf=[{"required": ["a"]}, {"required": ["b"]}],
            ),
            ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
            ["{}"],
        ),
        (
            record(
                {"kind": {"enum": ["x", "y"]}, "a": INTEGER},
                required=["kind"],
                oneOf=[
                    {"properties": {"kind": {"const": "x"}}},
                    {"properties": {"kind": {"const": "y"}}, "required": ["a"]},
                ],
            ),
            ['{"kind":"x"}', '{"kind":"x","a":1}', '{"kind":"y","a":1}'],
            ['{"kind":"y"}'],
        ),
        ({"type": "string", "pattern": "^a|b$"}, ['"a"', '"xb"', '"axx"'], ['"xa"']),
        (
            {"type": "string", "pattern": '^[^x]"\\.\\\\$'},
            [r'"\n\".\\"', r'"é\".\\"'],
            [r'"x\".\\"', '"é".\\"'],
        ),
        (
            {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3},
            ['"ab"', '"abc"'],
            ['"a"', '"abcd"', '"ABC"'],
        ),
        ({"uniqueItems": True, "maxItems": 1, "items": NULL}, ["[null]"], ["[1]"]),
        (True, ["1", "null", '{"a":[]}', "[[1]]"], ["", "[[[1]]]"]),
    ],
)
def test_accepts_what_is_valid_in_the_fixed_form(schema, accepted, refused):
    regex = schema_regex(schema)
    assert [text for text in accepted if not matches(regex, text)] == []
    assert [text for text in refused if matches(regex, text)] == []
    for text in accepted:
        validator(schema).validate(json.loads(text))


def test_spaces_follow_commas_and_colons():
    schema = record({"a": {"enum": [[1, {"b": 2}]]}, "c": True}, required=["a"])
    regex = schema_regex(schema, spaces=True)
    for value in ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}], "c": [1, {"d": 2}]}):
        assert matches(regex, json.dumps(value))
        assert not matches(regex, text_of(value))


@pytest.mark.parametrize("spaces", [False, True])
def test_json_mode_takes_objects_up_to_a_depth(spaces):
    regex = json_mode_regex(spaces=spaces)
    rng = random.Random(0)
    for _ in range(100):
        assert isinstance(json.loads(sample(regex, rng)), dict)
    for value in ({}, {"a": 1, "b": [1, [2]]}, {"a": {"b": {"c": "d"}}}):
        assert matches(regex, text_of(value, spaces))
    for value in ([], 1, {"a": {"b": {"c": {}}}}):
        assert not matches(regex, text_of(value, spaces))
    with pytest.raises(ValueError, match="depth: want 1..4"):
        json_mode_regex(5)


UNSUPPORTED = {
    **{key: {} for key in "not if then else contains propertyNames".split()},
    **{key: {} for key in "dependentRequired dependentSchemas dependencies".split()},
    **{key: False for key in "unevaluatedProperties unevaluatedItems".split()},
    **{key: 1 for key in "minProperties maxProperties minContains".split()},
    **{"maxContains": 1, "patternProperties": {}, "additionalItems": False},
    **{key: "base64" for key in "contentEncoding contentMediaType".split()},
    **{"contentSchema": {}, "$anchor": "a", "$dynamicRef": "#a", "nullable": True},
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_keywords_are_named(key):
    schema = record({"age": {"type": "integer", key: UNSUPPORTED[key]}})
    with pytest.raises(ValueError) as error:
        schema_regex(schema)
    place = f"json_schema: $.properties.age.{key}: "
    assert str(error.value).startswith(place + "this keyword is not supported")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "$: want a schema, got []"),
        (3, "$: want a schema, got 3"),
        (False, "$: the schema false accepts no value"),
        ({"type": "int"}, "$.type: want one or a list of null, boolean"),
        ({"type": []}, "$.type: want one"),
        ({"properties": []}, "$.properties: want an object of schemas"),
        (record({"a": 1}), "$.properties: want an object of schemas"),
        ({"minLength": -1}, "$.minLength: want an integer from 0 to 1,000, got -1"),
        ({"maxLength": 100_000}, "$.maxLength: want an integer from 0 to 1,000"),
        ({"maxItems": True}, "$.maxItems: want an integer"),
        ({"minimum": 3, "maximum": 2}, "$.minimum: the value is larger than maximum"),
        ({"exclusiveMinimum": True}, "$.exclusiveMinimum: want a number"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "$: no number"),
        ({"type": "integer", "multipleOf": 7}, "$: multiples of 7 need a minimum"),
        ({"type": "number", "multipleOf": 0.01}, "$: multipleOf is supported with"),
        ({"multipleOf": 0}, "$.multipleOf: want a positive number"),
        (record({}, required=["a"]), "$.required: 'a' is not one of the properties"),
        ({"enum": []}, "$.enum: want a list of values that is not empty"),
        ({"enum": [1], "type": "string"}, "$: no value of enum or const is valid"),
        ({"anyOf": []}, "$.anyOf: want a list of schemas"),
        ({"items": [{}]}, "$.items: want a schema (prefixItems takes a list)"),
        ({"uniqueItems": True}, "$.uniqueItems: true is supported with maxItems"),
        ({"type": "string", "format": "iri"}, "$.format: want one of date, time"),
        ({"type": "string", "pattern": "(?=a)"}, "$.pattern: look-around"),
        ({"type": "string", "pattern": "a(b"}, "$.pattern: a parenthesis"),
        ({"pattern": "a", "maxLength": 5}, "$.pattern: minLength and maxLength"),
        ({"pattern": "^a$", "format": "date"}, "$.format: no pattern"),
        ({"typ": "string"}, "$.typ: this keyword is unknown"),
        ({"items": {"$id": "x"}}, "$.items.$id: this keyword is supported at the root"),
        ({"$ref": "http://x.y"}, "$.$ref: want a reference within the schema"),
        ({"$ref": "#/$defs/a"}, "$.$ref: '#/$defs/a' does not exist"),
        ({"$ref": "#"}, "$.$ref: '#' is recursive, which is not supported"),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}},
            "$.$defs.n.items.$ref: '#/$defs/n' is recursive",
        ),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "$.oneOf: the alternatives 0 and 1"),
        ({"oneOf": [{"required": ["a"]}, STRING]}, "$.oneOf: the alternatives 0 and 1"),
        ({"allOf": [INTEGER, STRING]}, "$: no value is valid"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "$: two values of pattern"),
        ({"const": "\ud800"}, "$.const: a string has half of a surrogate pair"),
        ({"const": float("nan")}, "$.const: nan is not a JSON number"),
        ({"const": (1, 2)}, "$.const: a tuple is not a JSON value"),
        ({"const": 10**5000}, "$.const: the number has more than"),
        ({1: 2}, "$: the key 1 is not a string"),
        (record({"a\nb": {"not": {}}}), "$.properties['a\\nb'].not: this keyword"),
        (
            {"items": {"items": STRING | {"maxLength": 999}, "maxItems": 999}},
            "$.items: about",
        ),
    ],
)
def test_faults_are_named_in_one_line(schema, message):
    with pytest.raises(ValueError) as error:
        schema_regex(schema, name="response_format")
    assert str(error.value).startswith("response_format: " + message)
    assert "\n" not in str(error.value)


def nested(levels, key="items"):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {key: [schema] if key == "allOf" else schema}
    return schema


def chain(levels, *, width):
    """Returns a schema whose definitions refer to the next one `width` times."""
    defs = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"} for _ in range(width)]}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        *(nested(100), nested(100_000), nested(100, "allOf")),
        *(chain(100, width=1), chain(30, width=2)),
        {"anyOf": [{"enum": [i]} for i in range(300)], "allOf": [{}]},
        record({f"name{i:0100}": STRING for i in range(400)}),
        {"enum": list(range(200_000))},
    ],
)
def test_large_schemas_are_refused(schema):
    with pytest.raises(ValueError, match=r"^json_schema: \$"):
        schema_regex(schema)


def test_deep_schemas_are_written():
    # An array has two copies of its items, so that levels of arrays are few.
    assert matches(schema_regex(nested(10)), "[" * 10 + "7" + "]" * 10)
    schema = INTEGER
    for _ in range(50):
        schema = record({"a": schema}, required=["a"])
    assert matches(schema_regex(schema), '{"a":' * 50 + "7" + "}" * 50)
    assert matches(schema_regex(nested(15, "allOf")), "7")


def test_types_around_one_of_do_not_add_values():
    """Strings obey both alternatives, so that none may be written."""
    options = [record({"a": {"const": i}}, required=["a"]) for i in (1, 2)]
    for option in options:
        del option["type"]
    with pytest.raises(ValueError, match="may both be valid"):
        schema_regex({"type": ["object", "string"], "oneOf": options})
    regex = schema_regex({"type": ["object", "string"], "allOf": [{"oneOf": options}]})
    assert matches(regex, '{"a":1}') and not matches(regex, '"text"')


@pytest.mark.parametrize("module", ["json_schema", "numbers", "patterns"])
def test_examples_show_what_they_print(module):
    found = importlib.import_module(f"stree_jax.constraints.{module}")
    failed, attempted = doctest.testmod(found)
    assert attempted and not failed


def test_annotations_are_ignored():
    schema = {
        **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x:y"},
        **{"title": "t", "description": "d", "default": 1, "examples": [2]},
        **{"$comment": "c", "deprecated": True, "readOnly": True, "type": "null"},
    }
    assert schema_regex(schema) == "null"


def test_automata_of_outlines_core_accept_the_same_texts():
    outlines_core = pytest.importorskip("outlines_core")
    bytes_only = {bytes([byte]): [byte] for byte in range(256)}
    vocabulary = outlines_core.Vocabulary(256, bytes_only)

    def accepts(index, text):
        state = index.get_initial_state()
        for byte in b"\0" + text.encode():
            state = index.get_next_state(state, byte)
            if state is None:
                return False
        return index.is_final_state(state)

    for seed in range(SCHEMAS // 2):
        rng = random.Random(seed)
        try:
            regex = schema_regex(random_schema(rng))
        except ValueError:
            continue
        # The engine also tracks matches that start later, which can need exponentially
        # many states. None starts later if a byte comes first that occurs nowhere else.
        index = outlines_core.Index(f"\\x00(?:{regex})$", vocabulary)
        for _ in range(3):
            text = sample(regex, rng)
            assert accepts(index, text), (seed, text)
            place = rng.randrange(len(text))
            other = text[:place] + rng.choice('a1"{}[],: -\\') + text[place + 1 :]
            assert accepts(index, other) == matches(regex, other), (seed, other)
