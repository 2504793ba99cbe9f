"""Checks the messages of a chat. Unsupported parts are errors, never ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.server.errors import invalid
from stree_jax.server.tools import calls_of

# Fields of answers that clients send back. They are allowed if they are empty.
OF_ANSWERS = {"audio", "tool_calls", "function_call"}
ROLES_OF_RESULTS = ("tool", "function")  # of messages with the result of a call
# Fields that clients add to answers and that repeat or describe the content.
IGNORED = {
    "annotations",
    "parsed",  # OpenAI's client: the content as an object
    "provider_specific_fields",  # LiteLLM
    "thinking_blocks",  # LiteLLM: the reasoning with a signature
    "reasoning_details",  # OpenRouter: the reasoning with a signature
    "cache_control",
    "id",
}
EMPTY: tuple[Any, ...] = ("", [], {}, False)  # values that count as absent
REASONING = ("reasoning_content", "reasoning")  # two names of the same text
TEXTS_OF_MESSAGES = ("name", *REASONING, "thinking")  # passed on to the chat template
# Types of parts with a text, and the field of the text.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
IGNORED_OF_PARTS = {"cache_control", "prompt_cache_breakpoint", "annotations"}


def messages_of(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the messages of a request; raises ApiError if they are invalid."""
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages: want a list of at least one message", "messages")
    return tuple(_message(i, message) for i, message in enumerate(value))


def _message(i: int, message: Any) -> dict[str, Any]:
    """Returns message i of a chat; raises ApiError if it is invalid."""
    where = f"messages.[{i}]"
    if not isinstance(message, dict) or not is_text(message.get("role")):
        raise invalid(f"{where}: want an object with a role", where)
    role = message["role"]
    known = {"role", "content", "refusal", *TEXTS_OF_MESSAGES, *IGNORED}
    known |= {name for name in OF_ANSWERS if not message.get(name)}
    texts: tuple[str, ...] = TEXTS_OF_MESSAGES
    if role == "assistant":
        known.add("tool_calls")
    if role in ROLES_OF_RESULTS:
        texts = (*texts, "tool_call_id")
    _refuse_others(where, message, known | set(texts))
    found = {"role": role, "content": _content_of(where, message)}
    for name in texts:
        text = message.get(name)
        if text is not None and not is_text(text):
            raise invalid(f"{where}.{name}: want a text", f"{where}.{name}")
        if text:
            found[name] = text
    reasons = [found[name] for name in REASONING if name in found]
    calls = message.get("tool_calls")
    return (
        found
        | ({REASONING[0]: reasons[0]} if reasons else {})
        | ({"tool_calls": calls_of(f"{where}.tool_calls", calls)} if calls else {})
    )


def _content_of(where: str, message: Mapping[str, Any]) -> str:
    """Returns the text of a message. Answers may have a refusal in place of a content,
    or neither."""
    content = message.get("content")
    if message["role"] == "assistant" and content is None:
        refusal = message.get("refusal")
        return "" if refusal is None else _content(f"{where}.refusal", refusal)
    return _content(f"{where}.content", content)


def _refuse_others(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    """Raises ApiError if an object has a field that is neither empty nor in `known`.

    Args:
      where: name of the object, for the message.
      value: the object.
      known: names of the allowed fields.
    """
    others = {name for name, v in value.items() if v is not None and not _is_empty(v)}
    if extra := others - known:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)


def _is_empty(value: Any) -> bool:
    """True for a value that counts as absent."""
    return any(value == empty and type(value) is type(empty) for empty in EMPTY)


def _content(where: str, content: Any) -> str:
    """Returns the text of a message, given as a text or as a list of text parts."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, Sequence):
        raise invalid(f"{where}: want a text, or a list of parts", where)
    texts: list[Any] = []
    for part in parts:
        if isinstance(part, dict):
            name = TEXT_PARTS.get(str(part.get("type")))
            if name is None:
                problem = f"{where}: only parts of type text are supported"
                raise invalid(problem, where)
            _refuse_others(where, part, {"type", name, *IGNORED_OF_PARTS})
            part = part.get(name)
        if not is_text(part):
            raise invalid(f"{where}: want texts of whole characters", where)
        texts.append(part)
    return "".join(texts)


def is_text(value: Any) -> bool:
    """True for a string that UTF-8 can encode. JSON also allows lone surrogates."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
