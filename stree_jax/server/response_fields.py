"""Translates requests of OpenAI's Responses API into requests of chats.

Errors of the chat's fields are renamed to the fields that the client sent.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from stree_jax.server import translated
from stree_jax.server.errors import ApiError, invalid, shown
from stree_jax.server.protocol import Request, parse
from stree_jax.server.tools import check_whole
from stree_jax.server.translated import Translated

# Fields with the same name and meaning in chats.
SAME = {
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "tool_choice",
    "parallel_tool_calls",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "moderation",
    "top_k",  # vLLM, like all of these
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "thinking_token_budget",
    "ignore_eos",
    "chat_template_kwargs",
    "priority",
    "request_id",
    "cache_salt",
}
# Unsupported fields, with values that have no effect. Other values are errors.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# Values of `include` that add to output which this server does not have.
INCLUDED = {
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
}
RENAMED = {"max_output_tokens": "max_completion_tokens"}
REPEATED = {"metadata", "reasoning", "text", "tool_choice", "user"}  # by answers
MARKS = {"id", "status", "type", "phase", "created_by"}  # of items; without effect


# Patterns of chats' fields, and the names of these fields here.
NAMES = (
    (r"^(tools\.\[\d+\]|tool_choice)\.function", r"\1"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^reasoning_effort$", "reasoning.effort"),
)


def parse_response(body: Any) -> Request:
    """Returns the request of a chat for a body of the Responses API; raises ApiError,
    which names the field of the body, if it is invalid."""
    if not isinstance(body, dict):
        raise invalid(
            "We could not parse the JSON body of your request: want an object"
        )
    fields = {name: value for name, value in body.items() if value is not None}
    _check_fields(fields)
    for name in set(fields) & REPEATED:
        check_whole(name, fields[name])
    messages = _messages_of(fields)
    chat = {name: fields[name] for name in SAME & set(fields)}
    chat |= {new: fields[old] for old, new in RENAMED.items() if old in fields}
    chat |= {"messages": messages.found, "tools": _tools_of(fields)}
    chat |= _of_text(fields) | _of_reasoning(fields)
    try:
        return parse("chat", chat)
    except ApiError as error:
        raise renamed(error, messages) from None


def renamed(error: ApiError, messages: Translated | None = None) -> ApiError:
    """Returns an error whose field has the name that it has in the Responses API."""
    return translated.renamed(error, messages or _no_messages(), NAMES)


def _no_messages() -> Translated:
    return Translated("input", "instructions")


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ApiError for unknown fields and for unsupported values."""
    own = {"input", "instructions", "tools", "text", "reasoning", "include", *RENAMED}
    for name, value in fields.items():
        if name in NEUTRAL:
            if not any(value == one for one in NEUTRAL[name]):
                problem = f"{name}: this server does not support it"
                raise invalid(problem, name, "unsupported_value")
        elif name not in SAME | own:
            problem = f"Unrecognized request argument supplied: {name}"
            raise invalid(problem, name, "unknown_parameter")
    included = fields.get("include", [])
    if not isinstance(included, list):
        raise invalid("include: want a list", "include")
    for value in included:
        if value not in INCLUDED:
            problem = f"include: this server does not support {shown(value)}"
            raise invalid(problem, "include", "unsupported_value")


def _messages_of(fields: Mapping[str, Any]) -> Translated:
    """Returns the messages of a request."""
    messages = _no_messages()
    instructions, given = fields.get("instructions"), fields.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise invalid("instructions: want a text", "instructions")
        if instructions:
            messages.add("instructions", {"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.add("input", {"role": "user", "content": given})
        return messages
    if not isinstance(given, list) or not given:
        raise invalid("input: want a text, or a list of items", "input")
    for i, item in enumerate(given):
        _add_item(messages, f"input.[{i}]", item)
    return messages


def _add_item(messages: Translated, where: str, item: Any) -> None:
    """Adds an item of the input to the messages."""
    if not isinstance(item, dict):
        raise invalid(f"{where}: want an object", where)
    given = {name: v for name, v in item.items() if v is not None}
    match given.get("type", "message"):
        case "message":
            marks = MARKS if "role" in given else set()
            own = {name: v for name, v in given.items() if name not in marks}
            messages.add(where, {"role": None} | own)
        case "function_call":
            _check_item(where, given, ("call_id", "name", "arguments"))
            function = {name: given[name] for name in ("name", "arguments")}
            call = {"id": given["call_id"], "type": "function", "function": function}
            messages.add_call(where, call)
        case "function_call_output":
            _check_item(where, given, ("call_id",), {"output"})
            message = {"role": "tool", "tool_call_id": given["call_id"]}
            messages.add(f"{where}.output", message | {"content": given.get("output")})
        case "reasoning":
            known = {"summary", "content", "encrypted_content"}
            _check_item(where, given, (), known)
            for name in ("content", "summary"):
                if texts := _texts(f"{where}.{name}", given.get(name, [])):
                    messages.reasoning.extend(texts)
                    break
        case kind:
            problem = f"{where}.type: this server does not support {shown(kind)}"
            raise invalid(problem, f"{where}.type")


def _check_item(
    where: str,
    item: Mapping[str, Any],
    texts: Sequence[str],
    others: Set[str] = frozenset(),
) -> None:
    """Raises ApiError unless an item has the fields `texts`, and only known ones."""
    for name in texts:
        if not isinstance(item.get(name), str):
            raise invalid(f"{where}.{name}: want a text", f"{where}.{name}")
    if extra := set(item) - set(texts) - others - MARKS:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)


def _texts(where: str, parts: Any) -> list[str]:
    """Returns the texts of the parts of a reasoning."""
    good = isinstance(parts, list) and all(isinstance(p, dict) for p in parts)
    texts = [part.get("text") for part in parts] if good else [None]
    if not all(isinstance(text, str) for text in texts):
        raise invalid(f"{where}: want a list of parts with a text", where)
    return [text for text in texts if text]


def _tools_of(fields: Mapping[str, Any]) -> Any:
    """Returns the tools in the form of chats."""
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        return tools  # an error, which `parse` names
    return [
        {"type": tool.get("type"), "function": {**tool, "type": None}}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def _of_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for the field `text`."""
    text = _object(fields, "text", {"format", "verbosity"})
    form = text.get("format")
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        described = {name: v for name, v in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": described}
    return {"response_format": form}


def _of_reasoning(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for the field `reasoning`."""
    known = {"effort", "summary", "generate_summary", "context", "mode"}
    effort = _object(fields, "reasoning", known).get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _object(fields: Mapping[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    """Returns a field that is an object; raises ApiError if it has unknown fields."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name}: want an object, got {shown(value)}", name)
    if extra := {k for k, v in value.items() if v is not None} - known:
        where = f"{name}.{min(extra)}"
        raise invalid(f"{where}: this server does not support it", where)
    return value
