"""Requests of the protocol, checked: what is not supported is named, never ignored.

Fields are those of OpenAI's API reference for completions and chat completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stree_jax.sampling.settings import Sampling
from stree_jax.server.errors import invalid

Kind = Literal["completion", "chat"]
MOST_STOPS, MOST_STOP_BYTES = 4, 256
MOST_SAMPLES = 128
DEFAULT_TOKENS = 16  # of completions; a chat answer may fill the context

# Fields that say who asks, or how to account for it: no answer depends on them.
WITHOUT_EFFECT = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
}
# Fields with the values that ask for nothing; any other value would change the answer.
NOTHING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
}
NOTHING_OF: dict[Kind, dict[str, tuple[Any, ...]]] = {
    "completion": {"echo": (False,), "suffix": ("",)},
    "chat": {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),  # of tools, and there are none
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    },
}
READ = {
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "logprobs",
}
READ_OF: dict[Kind, set[str]] = {
    "completion": {"prompt", "best_of"},
    "chat": {"messages", "max_completion_tokens", "top_logprobs"},
}


@dataclass(frozen=True)
class Request:
    """What somebody asks for.

    Attributes:
      kind: of the two endpoints.
      model: its name.
      prompts: texts or token ids (completions).
      messages: roles and texts (chat).
      max_tokens: None: as many as there is room for.
      temperature, top_p, seed: how tokens are drawn; a seed of None is nobody's.
      n: answers to each prompt.
      stops: texts that end an answer.
      top_logprobs: None: no log-probabilities are wanted.
      stream, usage: whether it comes piece by piece, and ends with the usage.
    """

    kind: Kind
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, str], ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    n: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    stream: bool
    usage: bool

    def sampling(self, seed: int) -> Sampling:
        """How answers are drawn, with a seed for those who gave none."""
        own = self.seed if self.seed is not None else seed
        return Sampling(self.temperature, top_p=self.top_p, seed=own)


def parse(kind: Kind, body: Any) -> Request:
    """A request from JSON; raises ApiError that names the field."""
    if not isinstance(body, dict):
        raise invalid(
            "We could not parse the JSON body of your request: want an object"
        )
    fields = {name: value for name, value in body.items() if value is not None}
    _check_unsupported(kind, fields)
    chat = kind == "chat"
    stream = _boolean(fields, "stream")
    request = Request(
        kind=kind,
        model=_model(fields),
        prompts=() if chat else _prompts(fields),
        messages=_messages(fields) if chat else (),
        max_tokens=_max_tokens(kind, fields),
        temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0),
        seed=_integer(fields, "seed", None, 0, 2**32 - 1),
        n=_integer(fields, "n", 1, 1, MOST_SAMPLES) or 1,
        stops=_stops(fields),
        top_logprobs=_chat_logprobs(fields) if chat else _logprobs(fields),
        stream=stream,
        usage=_usage(fields, stream),
    )
    best_of = _integer(fields, "best_of", request.n, 1, MOST_SAMPLES)
    if best_of != request.n:
        raise invalid(
            "best_of: only n answers are made, of which none is left out", "best_of"
        )
    try:
        request.sampling(0)
    except ValueError as error:
        raise invalid(str(error), str(error).partition(":")[0]) from error
    return request


def _check_unsupported(kind: Kind, fields: Mapping[str, Any]) -> None:
    nothing = NOTHING | NOTHING_OF[kind]
    known = READ | READ_OF[kind] | WITHOUT_EFFECT
    for name, value in fields.items():
        if name in nothing:
            if not any(_same(value, allowed) for allowed in nothing[name]):
                raise invalid(
                    f"{name}: this server does not support it",
                    name,
                    "unsupported_value",
                )
        elif name not in known:
            problem = f"Unrecognized request argument supplied: {name}"
            raise invalid(problem, name, "unknown_parameter")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not a number for a truth value."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("you must provide a model parameter", "model")
    return model


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise invalid(f"{name}: want true or false, got {_shown(value)}", name)
    return value


def _number(
    fields: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
    value = fields.get(name, default)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # NaN is refused, too
        problem = f"{name}: want a number in {low:g}..{high:g}, got {_shown(value)}"
        raise invalid(problem, name)
    return float(value)


def _integer(
    fields: Mapping[str, Any], name: str, default: int | None, low: int, high: int
) -> int | None:
    value = fields.get(name, default)
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        problem = f"{name}: want an integer in {low}..{high}, got {_shown(value)}"
        raise invalid(problem, name)
    return value


def _max_tokens(kind: Kind, fields: Mapping[str, Any]) -> int | None:
    names = [n for n in ("max_completion_tokens", "max_tokens") if n in fields]
    if len(names) == 2:
        raise invalid(
            "max_tokens and max_completion_tokens are one thing: give one", "max_tokens"
        )
    if not names:
        return DEFAULT_TOKENS if kind == "completion" else None
    return _integer(fields, names[0], None, 1, 2**31 - 1)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise invalid(f"stop: want a string, or a list of up to {MOST_STOPS}", "stop")
    for stop in stops:
        if not _is_text(stop) or not 0 < len(stop.encode()) <= MOST_STOP_BYTES:
            problem = f"stop: want texts of 1 to {MOST_STOP_BYTES} bytes"
            raise invalid(problem, "stop")
    return tuple(stops)


def _is_text(value: Any) -> bool:
    """A string that UTF-8 can spell: JSON may hold half a character."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _prompts(fields: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    if value is None:
        raise invalid("you must provide a prompt", "prompt")
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    good = isinstance(value, list) and value
    if not good or not all(_is_text(p) or _are_ids(p) for p in value):
        raise invalid("prompt: want a text, token ids, or a list of either", "prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in value)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def _messages(fields: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages: want a list of at least one message", "messages")
    return tuple(_message(i, message) for i, message in enumerate(value))


def _message(i: int, message: Any) -> dict[str, str]:
    where = f"messages.[{i}]"
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        raise invalid(f"{where}: want an object with a role", where)
    extra = {k for k, v in message.items() if v is not None} - {
        "role",
        "content",
        "name",
    }
    extra -= {"refusal", "annotations"}  # of answers that are sent back
    if extra:
        name = f"{where}.{min(extra)}"
        raise invalid(f"{name}: this server does not support it", name)
    text = _content(f"{where}.content", message.get("content"))
    named = message.get("name")
    if named is not None and not _is_text(named):
        raise invalid(f"{where}.name: want a text", f"{where}.name")
    return {"role": message["role"], "content": text} | (
        {} if named is None else {"name": named}
    )


def _content(where: str, content: Any) -> str:
    """A text, from one or from parts of text."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, Sequence):
        raise invalid(f"{where}: want a text, or a list of parts", where)
    texts: list[Any] = []
    for part in parts:
        if isinstance(part, dict):
            if part.get("type") != "text":
                problem = f"{where}: only parts of type text are supported"
                raise invalid(problem, where)
            part = part.get("text")
        if not _is_text(part):
            raise invalid(f"{where}: want texts of whole characters", where)
        texts.append(part)
    return "".join(texts)


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    return _integer(fields, "logprobs", None, 0, 20)


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    wanted = _boolean(fields, "logprobs")
    top = _integer(fields, "top_logprobs", None, 0, 20)
    if top is not None and not wanted:
        raise invalid("top_logprobs: wants logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options: want an object", "stream_options")
    if "stream_options" in fields and not stream:
        raise invalid("stream_options: wants stream to be true", "stream_options")
    options = {k: v for k, v in options.items() if v is not None}
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown or options.get("include_obfuscation"):
        name = min(unknown, default="include_obfuscation")
        problem = f"stream_options.{name}: this server does not support it"
        raise invalid(problem, f"stream_options.{name}")
    return _boolean(options, "include_usage")


def _shown(value: Any) -> str:
    """A value in a refusal, if it is short."""
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
