"""Checks the tools of a chat request, and the tool calls in its messages."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stree_jax.server.calls import Schemas
from stree_jax.server.errors import invalid, shown

MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# Fields that clients add to tool calls: of streams, and of parsed answers.
IGNORED_OF_CALLS = {"index", "provider_specific_fields", "cache_control"}
IGNORED_OF_FUNCTIONS = {"parsed_arguments", "provider_specific_fields"}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how the answer may use them.

    Attributes:
      tools: the functions, as objects with `name`, `parameters` and perhaps
        `description` and `strict`.
      choice: "auto"; "none" for an answer without calls; "required" for at least one
        call; "function" for a call of the function `name`.
      name: name of the function, for choice "function".
      parallel: False if an answer has at most one call.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def for_template(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call, as chat templates take them."""
        return tuple(
            {
                "type": "function",
                "function": {k: v for k, v in tool.items() if k != "strict"},
            }
            for tool in self.tools
            if self.choice != "function" or tool["name"] == self.name
        )

    @property
    def schemas(self) -> Schemas:
        """The schemas of parameters, by function and parameter."""
        found = {}
        for tool in self.tools:
            properties = tool["parameters"].get("properties")
            known = properties if isinstance(properties, dict) else {}
            found[tool["name"]] = known
        return found


def tools_of(fields: Mapping[str, Any]) -> ToolUse:
    """Returns the tools of a request; raises ApiError, which names the field, if they
    are invalid. An empty list counts as absent."""
    value = fields.get("tools", [])
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"tools: want a list of up to {MAX_TOOLS} tools", "tools")
    tools = tuple(_tool(f"tools.[{i}]", tool) for i, tool in enumerate(value))
    names = [tool["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            where = f"tools.[{i}].function.name"
            raise invalid(f"{where}: another tool has the name {name!r}", where)
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        problem = f"want true or false, got {shown(parallel)}"
        raise invalid(f"parallel_tool_calls: {problem}", "parallel_tool_calls")
    choice, name = _choice(fields.get("tool_choice", "auto"), names)
    return ToolUse(tools, choice, name, parallel) if tools else ToolUse()


def _tool(where: str, tool: Any) -> dict[str, Any]:
    """Returns the function of a tool, whose nulls are left out."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise invalid(f'{where}.type: want "function"', f"{where}.type")
    _check_fields(where, tool, {"type", "function", "cache_control"})
    where = f"{where}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}: want an object", where)
    known = {"name", "description", "parameters", "strict"}
    _check_fields(where, function, known)
    found = {k: v for k, v in function.items() if v is not None}
    _check_name(f"{where}.name", found.get("name"))
    for name, kind, wanted in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        if name in found and not isinstance(found[name], kind):
            problem = f"{where}.{name}: want {wanted}, got {shown(found[name])}"
            raise invalid(problem, f"{where}.{name}")
    parameters = found.get("parameters") or NO_PARAMETERS
    _check_parameters(f"{where}.parameters", parameters)
    check_whole(where, found)
    return found | {"parameters": parameters}


def _check_parameters(where: str, schema: Mapping[str, Any]) -> None:
    """Raises ApiError if a schema cannot be the one of a function's arguments."""
    kind, properties = schema.get("type", "object"), schema.get("properties", {})
    if kind != "object":
        problem = f'{where}.type: want "object", got {shown(kind)}'
        raise invalid(problem, f"{where}.type")
    if not isinstance(properties, dict):
        problem = f"want an object of schemas, got {shown(properties)}"
        raise invalid(f"{where}.properties: {problem}", f"{where}.properties")


def check_whole(where: str, value: Any) -> None:
    """Raises ApiError if a value cannot be written as JSON in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid(f"{where}: want texts of whole characters", where) from None
    except RecursionError:
        raise invalid(f"{where}: it is nested too deeply", where) from None


def _check_fields(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    """Raises ApiError if an object has a field that is not null and not in `known`."""
    given = {name for name, v in value.items() if v is not None}
    if extra := given - known:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)


def _check_name(where: str, name: Any) -> None:
    """Raises ApiError unless a name is a function's."""
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        problem = f"want a name of 1..64 of a-z A-Z 0-9 _ -, got {shown(name)}"
        raise invalid(f"{where}: {problem}", where)


def _choice(value: Any, names: Sequence[str]) -> tuple[Any, str | None]:
    """Returns the kind of `tool_choice`, and the name of the chosen function."""
    where = "tool_choice"
    if value in ("auto", "none"):
        return value, None
    named = isinstance(value, dict) and value.get("type") == "function"
    if value != "required" and not named:
        kinds = '"auto", "none", "required" or {"type": "function", "function": ..}'
        raise invalid(f"{where}: want {kinds}, got {shown(value)}", where)
    if not names:
        raise invalid(f"{where}: {shown(value)} needs tools", where)
    if value == "required":
        return "required", None
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else value.get("name")
    if name not in names:
        where = f"{where}.function.name"
        raise invalid(f"{where}: want the name of a tool, got {shown(name)}", where)
    return "function", name


def calls_of(where: str, value: Any) -> list[dict[str, Any]]:
    """Returns the tool calls of a message of the assistant, with their arguments as
    objects. Arguments that are not a JSON object stay a text.

    Args:
      where: name of the field, for errors.
      value: the list of calls.
    """
    if not isinstance(value, list):
        raise invalid(f"{where}: want a list of tool calls", where)
    return [_call(f"{where}.[{i}]", call) for i, call in enumerate(value)]


def _call(where: str, call: Any) -> dict[str, Any]:
    """Returns a tool call of a message."""
    if not isinstance(call, dict):
        raise invalid(f"{where}: want an object", where)
    if call.get("type", "function") not in ("function", None):
        raise invalid(f'{where}.type: want "function"', f"{where}.type")
    _check_fields(where, call, {"id", "type", "function", *IGNORED_OF_CALLS})
    call_id, function = call.get("id"), call.get("function")
    if call_id is not None and not isinstance(call_id, str):
        raise invalid(f"{where}.id: want a text", f"{where}.id")
    check_whole(f"{where}.id", call_id)
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise invalid(f"{where}: want an object", where)
    _check_fields(where, function, {"name", "arguments", *IGNORED_OF_FUNCTIONS})
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name: want the name of a function", f"{where}.name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        problem = f"{where}.arguments: want a text with a JSON object"
        raise invalid(problem, f"{where}.arguments")
    found = {"name": name, "arguments": _arguments(arguments)}
    check_whole(where, found)
    own = {} if call_id is None else {"id": call_id}
    return own | {"type": "function", "function": found}


def _arguments(value: str | dict[str, Any] | None) -> Any:
    """Returns arguments as an object, or as the text if it is not one in JSON: a model
    may have written it, and must be able to read its error."""
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value) if value and value.strip() else {}
    except (ValueError, RecursionError):
        return value
    if found is None:
        return {}
    return found if isinstance(found, dict) and _is_encodable(found) else value


def _is_encodable(value: Any) -> bool:
    """True if UTF-8 can encode all texts in a value, which then have no lone
    surrogates."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except (UnicodeEncodeError, RecursionError):
        return False
