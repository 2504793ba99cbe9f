"""Translates requests of Anthropic's Messages API into requests of chats.

Errors of the chat's fields are renamed to the fields that the client sent.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from stree_jax.server import translated
from stree_jax.server.errors import ApiError, invalid, shown
from stree_jax.server.messages import is_text
from stree_jax.server.protocol import Request, parse
from stree_jax.server.tools import check_whole
from stree_jax.server.translated import Translated

# Fields with the same name and meaning in chats.
SAME = {
    "model",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "metadata",
    "min_p",  # vLLM, like all of these
    "seed",
    "repetition_penalty",
    "ignore_eos",
    "chat_template_kwargs",
}
OWN = {
    "messages",
    "system",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
}
WITHOUT_EFFECT = {"cache_control", "service_tier", "inference_geo", "diagnostics"}
# Unsupported fields, with values that have no effect. Other values are errors.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",),
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "thread": (),  # conversations that the server holds
}
# With this code the anthropic package sends whole conversations instead.
CODES = {"thread": "thread_unsupported_request"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Values of `thinking.type`, and of the variable `enable_thinking` of chat templates.
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
# Fields of blocks and tools without effect.
MARKS = {"type", "cache_control", "caller", "eager_input_streaming"}
# Patterns of chats' fields, and the names of these fields here.
NAMES = (
    (r"^(tools\.\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\.\[\d+\]|tool_choice)\.function", r"\1"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^stop$", "stop_sequences"),
    (r"\.tool_call_id$", ".tool_use_id"),
    (r"^thinking_token_budget$", "thinking.budget_tokens"),
)


def parse_message(body: Any) -> Request:
    """Returns the request of a chat for a body of the Messages API; raises ApiError,
    which names the field of the body, if it is invalid."""
    if not isinstance(body, dict):
        raise invalid(
            "We could not parse the JSON body of your request: want an object"
        )
    fields = _given(body)
    _check_fields(fields)
    messages = _messages_of(fields)
    chat = {name: fields[name] for name in SAME & set(fields)}
    chat |= {"messages": messages.found, "stop": fields.get("stop_sequences", [])}
    chat |= _of_tools(fields) | _of_output(fields) | _of_thinking(fields)
    if _continues(messages):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        return parse("chat", chat)
    except ApiError as error:
        raise translated.renamed(error, messages, NAMES) from None


def renamed(error: ApiError) -> ApiError:
    """Returns an error whose field has the name that it has in the Messages API."""
    return translated.renamed(error, _no_messages(), NAMES)


def _no_messages() -> Translated:
    return Translated("messages", "system")


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: v for name, v in value.items() if v is not None}


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ApiError for unknown fields, unsupported values and a missing limit."""
    for name, value in fields.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                problem = f"{name}: this server does not support it"
                raise invalid(problem, name, CODES.get(name, "unsupported_value"))
        elif name not in SAME | OWN | WITHOUT_EFFECT:
            problem = f"Unrecognized request argument supplied: {name}"
            raise invalid(problem, name, "unknown_parameter")
    limit = fields.get("max_tokens")
    if not isinstance(limit, int | float) or limit < 0:  # a chat's -1 is no limit
        problem = "max_tokens: want the maximum number of tokens of the answer"
        raise invalid(f"{problem}, got {shown(limit)}", "max_tokens")
    for name in ("tools", "metadata"):
        check_whole(name, fields.get(name))


def _messages_of(fields: Mapping[str, Any]) -> Translated:
    """Returns the messages of a request."""
    messages = _no_messages()
    if system := fields.get("system"):
        parts = [_text(place, block) for place, block in _blocks("system", system)]
        messages.add("system", {"role": "system", "content": parts})
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages: want a list of at least one message", "messages")
    for i, message in enumerate(given):
        where = f"messages.[{i}]"
        if not isinstance(message, dict):
            raise invalid(f"{where}: want an object", where)
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            wanted = 'want "user", "assistant" or "system"'
            raise invalid(f"{where}.role: {wanted}, got {shown(role)}", f"{where}.role")
        _check(where, message, {"content"}, {"role"})
        _add_message(messages, where, role, message["content"])
    return messages


def _add_message(messages: Translated, where: str, role: str, content: Any) -> None:
    """Adds a message: the results of tools, each a message of its own, and the rest."""
    texts: list[Any] = []
    calls: list[tuple[str, Any]] = []
    results = False
    for place, block in _blocks(f"{where}.content", content):
        match role, block.get("type"):
            case _, "text":
                texts.append(_text(place, block))
            case "user", "tool_result":
                if texts:
                    _add_text(messages, where, role, texts)
                texts, results = [], True
                messages.add(place, _result(place, block))
            case "assistant", "thinking":
                _check(place, block, {"thinking"}, {"signature"})
                if not is_text(block["thinking"]):
                    place = f"{place}.thinking"
                    raise invalid(f"{place}: want a text of whole characters", place)
                messages.reasoning.append(block["thinking"])
            case "assistant", "tool_use":
                calls.append((place, _call(place, block)))
            case _, kind:
                problem = f"{place}.type: this server does not support {shown(kind)}"
                raise invalid(f"{problem} of {role}", f"{place}.type")
    if role == "assistant":
        messages.add(where, {"role": role, "content": texts})
    elif texts or not results:
        _add_text(messages, where, role, texts)
    for place, call in calls:
        messages.add_call(place, call)


def _add_text(messages: Translated, where: str, role: str, texts: list[Any]) -> None:
    """Adds texts to the last message if it has the same role, else as a new one."""
    last = messages.found[-1] if messages.found else {}
    if role == "user" and last.get("role") == role:
        last["content"] += [{"type": "text", "text": "\n"}, *texts]
    else:
        messages.add(where, {"role": role, "content": texts})


def _blocks(where: str, content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the fields of each block of a content."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid(f"{where}: want a text, or a list of blocks", where)
    for i, block in enumerate(content):
        place = f"{where}.[{i}]"
        if not isinstance(block, dict):
            raise invalid(f"{place}: want an object", place)
        yield place, _given(block)


def _text(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a chat's message for a block of text."""
    if block.get("type") != "text":
        raise invalid(f'{where}.type: want "text"', f"{where}.type")
    _check(where, block, {"text"})
    if not is_text(block["text"]):
        raise invalid(f"{where}.text: want a text of whole characters", f"{where}.text")
    return {"type": "text", "text": block["text"]}


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message of a tool's result. Chat templates have no place for
    `is_error`; the content says what went wrong."""
    _check(where, block, {"tool_use_id"}, {"content", "is_error"})
    own = {"role": "tool", "tool_call_id": block["tool_use_id"]}
    failed = "Error" if block.get("is_error") else ""
    return own | {"content": block.get("content") or failed}


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call of the assistant."""
    _check(where, block, {"id", "name", "input"})
    if not isinstance(block["input"], dict):
        raise invalid(f"{where}.input: want an object", f"{where}.input")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _check(
    where: str,
    value: Mapping[str, Any],
    needed: Set[str],
    known: Set[str] = frozenset(),
) -> None:
    """Raises ApiError unless an object has the fields `needed`, and only known ones."""
    given = set(_given(value))
    if missing := needed - given:
        name = f"{where}.{min(missing)}"
        raise invalid(f"{name}: it is missing", name)
    if extra := given - needed - known - MARKS:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)


def _continues(messages: Translated) -> bool:
    """True if the answer continues the last message, which is the assistant's."""
    last = messages.found[-1]
    return last["role"] == "assistant" and not last.get("tool_calls")


def _of_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for `tools` and `tool_choice`."""
    tools = fields.get("tools", [])
    if isinstance(tools, list):
        tools = [_tool(f"tools.[{i}]", tool) for i, tool in enumerate(tools)]
    if "tool_choice" not in fields:
        return {"tools": tools}
    choice = _object("tool_choice", fields["tool_choice"])
    kind = choice.get("type")
    if kind not in (*CHOICES, "tool"):
        wanted = f"want one of {', '.join((*CHOICES, 'tool'))}, got {shown(kind)}"
        raise invalid(f"tool_choice.type: {wanted}", "tool_choice.type")
    if kind in ("any", "tool") and not tools:
        raise invalid(f"tool_choice.type: {shown(kind)} needs tools", "tool_choice")
    needed = {"name"} if kind == "tool" else set()
    _check("tool_choice", choice, needed, {"disable_parallel_tool_use"})
    single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise invalid(f"{where}: want true or false, got {shown(single)}", where)
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {
        "tools": tools,
        "tool_choice": named if kind == "tool" else CHOICES[kind],
        "parallel_tool_calls": not single,
    }


def _tool(where: str, tool: Any) -> dict[str, Any]:
    """Returns a tool in the form of chats."""
    given = _object(where, tool)
    if (kind := given.get("type", "custom")) != "custom":
        problem = f"{where}.type: this server only supports custom tools"
        raise invalid(f"{problem}, got {shown(kind)}", f"{where}.type")
    _check(where, given, {"name", "input_schema"}, {"description", "strict"})
    known = ("name", "description", "strict")
    function: dict[str, Any] = {name: given[name] for name in known if name in given}
    function |= {"parameters": given["input_schema"]}
    return {"type": "function", "function": function}


def _of_output(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for `output_config`."""
    config = _object("output_config", fields.get("output_config", {}))
    _check("output_config", config, set(), {"effort", "format"})
    found = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if "format" not in config:
        return found
    where = "output_config.format"
    form = _object(where, config["format"])
    if form.get("type") != "json_schema":
        raise invalid(f'{where}.type: want "json_schema"', f"{where}.type")
    _check(where, form, {"schema"})
    schema = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return found | {"response_format": schema}


def _of_thinking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for `thinking`."""
    if "thinking" not in fields:
        return {}
    thinking = _object("thinking", fields["thinking"])
    kind = thinking.get("type")
    if kind not in tuple(THINKING):  # it may be unhashable
        wanted = f"want one of {', '.join(THINKING)}, got {shown(kind)}"
        raise invalid(f"thinking.type: {wanted}", "thinking.type")
    _check("thinking", thinking, set(), {"budget_tokens", "display"})
    if thinking.get("display", "summarized") != "summarized":
        problem = "thinking.display: this server shows all reasoning"
        raise invalid(f'{problem}; want "summarized"', "thinking.display")
    variables = _object("chat_template_kwargs", fields.get("chat_template_kwargs", {}))
    return {
        "chat_template_kwargs": {"enable_thinking": THINKING[kind]} | variables,
        "thinking_token_budget": thinking.get("budget_tokens"),
    }


def _object(where: str, value: Any) -> dict[str, Any]:
    """Returns the fields of an object that are not null; raises ApiError if the value
    is not an object."""
    if not isinstance(value, dict):
        raise invalid(f"{where}: want an object, got {shown(value)}", where)
    return _given(value)
