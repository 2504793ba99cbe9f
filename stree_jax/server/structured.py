"""The structure that a request demands of the text of its answers.

OpenAI's field is `response_format`; vLLM, SGLang and llama.cpp add others.
"""

import json
from collections.abc import Mapping
from typing import Any

from stree_jax.constraints.constraint import Constraint
from stree_jax.server.errors import invalid, shown

FORMATS = ("text", "json_object", "json_schema")
# Fields of `json_schema` that have no effect, and their types.
IGNORED_OF_SCHEMAS = {"name": str, "description": str, "strict": bool}
# Other servers' fields, and what their values are.
OTHERS = {
    "guided_json": "schema",  # vLLM
    "guided_regex": "regex",
    "guided_choice": "choice",
    "json_schema": "schema",  # llama.cpp and SGLang
    "regex": "regex",  # SGLang
}
# The parts of vLLM's `structured_outputs`.
PARTS = {"json": "schema", "regex": "regex", "choice": "choice", "json_object": "any"}


def structure_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Returns the constraint that a request demands, or None.

    Raises:
      ApiError: a field is malformed, two fields demand something, or what is demanded
        cannot be enforced. It names the field and the place in it.
    """
    found = {}
    for name, kind in OTHERS.items():
        if name in fields:
            found[name] = _constraint(name, kind, fields[name])
    if "response_format" in fields:
        constraint = _of_format(fields["response_format"])
        if constraint is not None:
            found["response_format"] = constraint
    if "structured_outputs" in fields:
        found["structured_outputs"] = _of_parts(fields["structured_outputs"])
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{second}: send only one of {first} and {second}", second)
    return next(iter(found.values()), None)


def _of_format(value: Any) -> Constraint | None:
    """Returns the constraint of a `response_format`."""
    where = "response_format"
    if not isinstance(value, dict):
        raise invalid(f"{where}: want an object, got {shown(value)}", where)
    kind = value.get("type")
    if kind not in FORMATS:
        wanted = f"want one of {', '.join(FORMATS)}"
        raise invalid(f"{where}.type: {wanted}", f"{where}.type")
    inner = {"json_schema", "schema"} if kind != "text" else set()
    given = {name for name, v in value.items() if v is not None}
    if extra := given - inner - {"type"}:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)
    if kind == "text":
        return None
    if "schema" in given:  # llama.cpp's place of the schema, for both types
        return _constraint(f"{where}.schema", "schema", value["schema"])
    if kind == "json_object":
        return Constraint.any_json()
    where = f"{where}.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        problem = "want an object with a name and a schema"
        raise invalid(f"{where}: {problem}, got {shown(described)}", where)
    if extra := {k for k, v in described.items() if v is not None} - {
        "schema",
        *IGNORED_OF_SCHEMAS,
    }:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)
    for field, kind in IGNORED_OF_SCHEMAS.items():
        own = described.get(field)
        if own is not None and not isinstance(own, kind):
            wanted = "a text" if kind is str else "true or false"
            name = f"{where}.{field}"
            raise invalid(f"{name}: want {wanted}, got {shown(own)}", name)
    return _constraint(f"{where}.schema", "schema", described["schema"])


def _of_parts(value: Any) -> Constraint:
    """Returns the constraint of vLLM's `structured_outputs`."""
    where = "structured_outputs"
    fields = value.items() if isinstance(value, dict) else ()
    given = [name for name, v in fields if v is not None and v is not False]
    if len(given) != 1 or given[0] not in PARTS:
        wanted = f"want an object with one of {', '.join(PARTS)}"
        raise invalid(f"{where}: {wanted}, got {shown(value)}", where)
    (name,) = given
    return _constraint(f"{where}.{name}", PARTS[name], value[name])


def _constraint(where: str, kind: str, value: Any) -> Constraint:
    """Returns the constraint of a field, whose value is a "schema", a "regex", a
    "choice" or "any" JSON."""
    try:
        if kind == "schema":
            schema = json.loads(value) if isinstance(value, str) else value
            return Constraint.json(schema, name=where)
        if kind == "choice":
            return Constraint.choice(value, name=where)
        if kind == "any":
            return Constraint.any_json()
        return Constraint(value, name=where)
    except (ValueError, RecursionError) as error:
        text = str(error)
        problem = text if text.startswith(where) else f"{where}: {text}"
        raise invalid(problem, where) from None
