"""Checks the messages of a chat. Unsupported parts are errors, never ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.server.errors import invalid

# Fields of answers that clients send back. They are allowed if they are empty.
OF_ANSWERS = {"refusal", "annotations", "audio", "tool_calls", "function_call"}
EMPTY: tuple[Any, ...] = ("", [], {}, False)  # values that count as absent
TEXTS_OF_MESSAGES = ("name", "reasoning_content")  # passed on to the chat template


def messages_of(fields: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """Returns the messages of a request; raises ApiError if they are invalid."""
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages: want a list of at least one message", "messages")
    return tuple(_message(i, message) for i, message in enumerate(value))


def _message(i: int, message: Any) -> dict[str, str]:
    """Returns message i of a chat; raises ApiError if it is invalid."""
    where = f"messages.[{i}]"
    if not isinstance(message, dict) or not is_text(message.get("role")):
        raise invalid(f"{where}: want an object with a role", where)
    known = {"role", "content", *TEXTS_OF_MESSAGES}
    known |= {name for name in OF_ANSWERS if not message.get(name)}
    _refuse_others(where, message, known)
    found = {
        "role": message["role"],
        "content": _content(f"{where}.content", message.get("content")),
    }
    for name in TEXTS_OF_MESSAGES:
        text = message.get(name)
        if text is not None and not is_text(text):
            raise invalid(f"{where}.{name}: want a text", f"{where}.{name}")
        if text:
            found[name] = text
    return found


def _refuse_others(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    """Raises ApiError for a field that is not empty and not in `known`."""
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
            if part.get("type") != "text":
                problem = f"{where}: only parts of type text are supported"
                raise invalid(problem, where)
            _refuse_others(where, part, {"type", "text", "cache_control"})
            part = part.get("text")
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
