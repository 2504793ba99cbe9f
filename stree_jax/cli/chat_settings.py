"""Settings of a chat that `/set` changes."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from stree_jax.cli.conversation import ChatModel

# Keys of /set, and what they change.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "sampling temperature; 0 is greedy",
        "top-k": "sample from the K most likely tokens; 0 is all",
        "top-p": "sample from the likeliest tokens of this total probability; 1 is all",
        "min-p": "drop tokens less likely than this times the most likely one",
        "repetition-penalty": "above 1, tokens of the text so far are less likely",
        "presence-penalty": "above 0, tokens of the answer so far are less likely",
        "frequency-penalty": "the same for each time that the answer has a token",
        "seed": "seed of the random numbers",
        "max-new-tokens": "most tokens of an answer; off: until the model ends it",
        "system": "system message; starts a new conversation",
    }
)
WHOLE = ("top-k", "seed", "max-new-tokens")


def values_of(chat: ChatModel) -> dict[str, str]:
    """Returns the values of all settings but the system message, in words."""
    values: dict[str, str] = {}
    for key in KEYS:
        if key == "system":
            continue
        value = (
            chat.max_new_tokens
            if key == "max-new-tokens"
            else getattr(chat.sampling, key.replace("-", "_"))
        )
        values[key] = {"max-new-tokens": "off", "seed": "0"}.get(key, "")
        if value is not None:
            values[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return values


def key_and_value(text: str) -> tuple[str, str]:
    """Splits the argument of /set. Returns the key as `KEYS` spells it, and the value.

    Raises:
      ValueError: the key is not known.
    """
    key, *rest = re.split(r"[\s=]+", text.strip(), maxsplit=1)
    key = key.lower().lstrip("-").replace("_", "-")
    if key in ("drafter", "model", "dtype", "tree", "rule", "context", "memory"):
        raise ValueError(f"/set {key}: fixed during a chat; start with --{key}")
    if key not in KEYS:
        raise ValueError(f"/set {key}: unknown; known: {', '.join(KEYS)}")
    return key, "".join(rest)


def with_setting(chat: ChatModel, key: str, value: str) -> ChatModel:
    """Returns the chat with a setting changed.

    Args:
      chat: the chat.
      key: one of `KEYS`, but not "system".
      value: the new value as text.

    Raises:
      ValueError: the value is wrong.
    """
    if key == "max-new-tokens" and value.lower() in ("off", "none", "-1"):
        return replace(chat, max_new_tokens=None)
    try:
        number = int(value) if key in WHOLE else float(value)
    except ValueError:
        kind = "an integer" if key in WHOLE else "a number"
        raise ValueError(f"/set {key}: want {kind}, got {value!r}") from None
    if key == "max-new-tokens":
        if number < 1:
            raise ValueError(f"/set {key}: want at least 1 token or off, got {value}")
        return replace(chat, max_new_tokens=int(number))
    try:
        changed: dict[str, Any] = {key.replace("-", "_"): number}
        sampling = replace(chat.sampling, **changed)
    except ValueError as error:
        raise ValueError(f"/set {error}") from error
    if sampling.temperature == 0 and "rule" in chat.options and chat.options["rule"]:
        raise ValueError("/set temperature: --rule needs a temperature above 0")
    return replace(chat, sampling=sampling)
