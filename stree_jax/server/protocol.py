"""Parses and checks requests. `fields` lists the known fields.

docs/reference/server.md compares the meaning of special values here and in other
servers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stree_jax.constraints.constraint import Constraint
from stree_jax.constraints.reasoning import MOST_TOKENS
from stree_jax.sampling.settings import Sampling
from stree_jax.server.errors import invalid, shown
from stree_jax.server.fields import (
    BUDGETS,
    MAX_TOKENS,
    NEUTRAL,
    NEUTRAL_OF,
    READ,
    READ_OF,
    WITHOUT_EFFECT,
    Kind,
)
from stree_jax.server.messages import is_text, messages_of
from stree_jax.server.rows import MAX_STOP_IDS
from stree_jax.server.structured import structure_of
from stree_jax.server.tools import ToolUse, tools_of

MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_SAMPLES = 128
DEFAULT_TOKENS = 16  # max_tokens of completions; a chat answer may fill the context
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0  # beyond, logits overflow or underflow
MOST_BIAS, MAX_BIASES = 100, 1024  # of `logit_bias`: size and number, as OpenAI's
ID = re.compile("[0-9]{1,10}")  # a token id as a text
FORBIDDING = 1e6  # a bias that leaves no other choice
SMALLEST = float(np.finfo(np.float32).tiny)  # smaller numbers are 0 on the device


@dataclass(frozen=True)
class Turn:
    """Settings for the end of a conversation in the chat template.

    Attributes:
      begins: True if the model begins a new turn (`add_generation_prompt`).
      continues: True if it continues the last message (`continue_final_message`).
      variables: other variables of the template, such as `enable_thinking`.
      tools: tools that the model may call, in the template's form.
    """

    begins: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
      kind: "completion" or "chat".
      model: name of the model, or "" for the only one.
      prompts: texts or token ids (completions).
      messages: roles, texts and tool calls (chat).
      turn: settings for the end of the messages in the chat template, and the tools.
      tool_use: the tools, and how the answer may use them (chat).
      structure: constraint on the text of an answer, or None.
      parse_calls: False if tool calls stay in the content.
      split_reasoning: False if reasoning stays in the content.
      thinking_budget: maximum number of tokens of the reasoning, or None (chat).
      max_tokens: maximum number of tokens of an answer. If None, the context limits it.
      temperature, top_p, top_k, min_p: see `Sampling`; not used with temperature 0.
      logits: the penalties and the bias, as fields of `Sampling`.
      seed: 0..2^64-1. If None, the server draws a seed.
      ignore_eos: if True, the model's stop tokens do not end an answer.
      min_tokens: number of tokens before a stop token or string may end an answer.
      stop_ids: further tokens that end an answer.
      echo: True if the text of an answer begins with the prompt (completions).
      private: True if nothing of the texts is kept for other requests (`cache_salt`).
      n: number of answers per prompt.
      stops: strings that end an answer.
      top_logprobs: number of alternatives with log-probabilities per token. If None, no
        log-probabilities are returned.
      origins: True if an answer lists its tokens by what proposed them.
      stream: True if the answer is streamed.
      usage: True if a stream ends with the usage.
    """

    kind: Kind
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, Any], ...]
    turn: Turn
    tool_use: ToolUse
    structure: Constraint | None
    parse_calls: bool
    split_reasoning: bool
    thinking_budget: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logits: Mapping[str, Any]
    seed: int | None
    ignore_eos: bool
    min_tokens: int
    stop_ids: tuple[int, ...]
    echo: bool
    private: bool
    n: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    origins: bool
    stream: bool
    usage: bool

    def sampling(self, seed: int) -> Sampling:
        """Returns the sampling settings, with the lower 32 bits of the seed. The upper
        ones are `seed_high`, because seeds of `Sampling` have 32 bits.

        Args:
          seed: the seed to use if the request has none.
        """
        own = (self.seed if self.seed is not None else seed) % 2**32
        if self.temperature == 0:
            return Sampling(0.0, **self.logits)
        return Sampling(
            self.temperature,
            **self.logits,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=own,
        )

    @property
    def seed_high(self) -> int:
        """The upper 32 bits of the seed; 0 if the request has none."""
        return (self.seed or 0) >> 32


def parse(kind: Kind, body: Any) -> Request:
    """Returns the request in a JSON body; raises ApiError, which names the field, if it
    is invalid."""
    if not isinstance(body, dict):
        raise invalid(
            "We could not parse the JSON body of your request: want an object"
        )
    fields = {name: value for name, value in body.items() if value is not None}
    _check_unsupported(kind, fields)
    chat = kind == "chat"
    stream = _boolean(fields, "stream")
    temperature, top_p = _temperature(fields), _number(fields, "top_p", 1.0, 0.0, 1.0)
    if top_p < SMALLEST:  # keeps only the likeliest token: greedy decoding
        temperature = top_p = 0.0
    use = tools_of(fields) if chat else ToolUse()
    request = Request(
        kind=kind,
        model=_model(fields),
        prompts=() if chat else _prompts(fields),
        messages=messages_of(fields) if chat else (),
        turn=replace(_turn(fields), tools=use.for_template),
        tool_use=use,
        structure=structure_of(fields),
        parse_calls=not chat or _boolean(fields, "parse_tool_calls", True),
        split_reasoning=not chat or _split_reasoning(fields),
        thinking_budget=_thinking_budget(kind, fields),
        max_tokens=_max_tokens(kind, fields),
        temperature=temperature,
        top_p=top_p or 1.0,
        top_k=_top_k(fields),
        min_p=_min_p(fields),
        logits={
            "repetition_penalty": _repetition_penalty(fields),
            "presence_penalty": _number(fields, "presence_penalty", 0.0, -2.0, 2.0),
            "frequency_penalty": _number(fields, "frequency_penalty", 0.0, -2.0, 2.0),
            "logit_bias": _logit_bias(fields),
        },
        seed=_seed(fields),
        ignore_eos=_boolean(fields, "ignore_eos"),
        min_tokens=_integer(fields, "min_tokens", 0, 0, 2**31 - 1) or 0,
        stop_ids=_stop_ids(fields),
        echo=_boolean(fields, "echo"),
        private=_private(fields),
        n=_integer(fields, "n", 1, 1, MAX_SAMPLES) or 1,
        stops=_stops(fields),
        top_logprobs=_chat_logprobs(fields) if chat else _logprobs(fields),
        origins=_boolean(fields, "return_origins"),
        stream=stream,
        usage=_usage(fields, stream),
    )
    if request.echo and request.top_logprobs is not None:
        problem = "echo: cannot be combined with logprobs, which prompts do not have"
        raise invalid(problem, "echo")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        problem = f"want at most max_tokens, {request.max_tokens}"
        problem = f"min_tokens: {problem}, got {request.min_tokens}"
        raise invalid(problem, "min_tokens")
    best_of = _integer(fields, "best_of", request.n, 1, MAX_SAMPLES)
    if best_of != request.n:
        raise invalid(
            "best_of: want the value of n; all generated answers are returned",
            "best_of",
        )
    return request


def _check_unsupported(kind: Kind, fields: Mapping[str, Any]) -> None:
    """Raises ApiError for unknown fields, and for unsupported values."""
    neutral_values = NEUTRAL | NEUTRAL_OF[kind]
    known = READ | READ_OF[kind] | WITHOUT_EFFECT
    for name, value in fields.items():
        if name in neutral_values:
            allowed = neutral_values[name]
            if not any(_same(value, one) for one in allowed):
                neutral = " or ".join(json.dumps(one) for one in allowed)
                only = f", only {neutral}" if neutral else ""
                raise invalid(
                    f"{name}: this server does not support it{only}",
                    name,
                    "unsupported_value",
                )
        elif name not in known:
            problem = f"Unrecognized request argument supplied: {name}"
            raise invalid(problem, name, "unknown_parameter")


def _same(value: Any, allowed: Any) -> bool:
    """True if a value is equal to an allowed one. Null fields of an object count as
    absent, and true and false are not equal to 1 and 0."""
    if isinstance(value, dict):
        value = {name: v for name, v in value.items() if v is not None}
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _model(fields: Mapping[str, Any]) -> str:
    """Returns the model's name, or "" if the request does not name a model."""
    model = fields.get("model", "")
    if not isinstance(model, str):
        raise invalid(f"model: want a name, got {shown(model)}", "model")
    return model


def _boolean(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if isinstance(value, int) and value in (0, 1):  # vLLM also accepts 0 and 1
        return bool(value)
    raise invalid(f"{name}: want true or false, got {shown(value)}", name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(
    fields: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
    value = fields.get(name, default)
    if not _is_number(value) or not low <= value <= high:  # also rejects NaN
        problem = f"{name}: want a number in {low:g}..{high:g}, got {shown(value)}"
        raise invalid(problem, name)
    return float(value)


def _integer(
    fields: Mapping[str, Any], name: str, default: int | None, low: int, high: int
) -> int | None:
    """Returns an integer field. 16.0 is accepted, because JSON has a single type of
    number."""
    value = fields.get(name, default)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    whole = _is_number(value) and isinstance(value, int)
    if not whole or not low <= value <= high:
        problem = f"{name}: want an integer in {low}..{high}, got {shown(value)}"
        raise invalid(problem, name)
    return value


def _temperature(fields: Mapping[str, Any]) -> float:
    """Returns the temperature; values that are 0 in float32 become 0."""
    value = _number(fields, "temperature", 1.0, 0.0, 2.0)
    return value if value >= SMALLEST else 0.0


def _top_k(fields: Mapping[str, Any]) -> int:
    """Returns top_k. 0 and -1 mean all tokens, as in vLLM and llama.cpp."""
    value = _integer(fields, "top_k", 0, -1, 2**63 - 1) or 0
    return min(max(value, 0), 2**31 - 1)


def _min_p(fields: Mapping[str, Any]) -> float:
    """Returns min_p, at most the largest float32 below 1. With 1, only tokens as likely
    as the best one would remain."""
    below_1 = float(np.nextafter(np.float32(1), np.float32(0)))
    return min(_number(fields, "min_p", 0.0, 0.0, 1.0), below_1)


def _repetition_penalty(fields: Mapping[str, Any]) -> float:
    """Returns the repetition penalty, under vLLM's or llama.cpp's name."""
    names = [n for n in ("repetition_penalty", "repeat_penalty") if n in fields]
    if len(names) == 2:
        problem = f"{names[1]}: the same as {names[0]}; send only one of them"
        raise invalid(problem, names[1])
    name = names[0] if names else "repetition_penalty"
    return _number(fields, name, 1.0, MIN_PENALTY, MAX_PENALTY)


def _seed(fields: Mapping[str, Any]) -> int | None:
    """Returns the seed as an unsigned 64-bit integer, or None for -1, which means a
    random seed in vLLM and llama.cpp. Other negative numbers are converted by two's
    complement, so that different seeds stay different."""
    value = _integer(fields, "seed", None, -(2**63), 2**64 - 1)
    return None if value in (None, -1) else value % 2**64


def _max_tokens(kind: Kind, fields: Mapping[str, Any]) -> int | None:
    """Returns the maximum number of tokens of an answer, or None for -1, which means no
    limit in llama.cpp. If a request has several of the fields in `MAX_TOKENS`, the
    first one in that list counts."""
    values = {n: _integer(fields, n, None, -1, 2**63 - 1) for n in MAX_TOKENS}
    given = [value for value in values.values() if value is not None]
    if not given:
        return DEFAULT_TOKENS if kind == "completion" else None
    return None if given[0] == -1 else min(given[0], 2**31 - 1)


def _private(fields: Mapping[str, Any]) -> bool:
    """Returns True if a request has a `cache_salt`. In vLLM, requests share cached
    prefixes only with those of the same salt; here they share nothing."""
    salt = fields.get("cache_salt", "x")
    if not is_text(salt) or not salt:
        problem = f"cache_salt: want a text that is not empty, got {shown(salt)}"
        raise invalid(problem, "cache_salt")
    return "cache_salt" in fields


def _thinking_budget(kind: Kind, fields: Mapping[str, Any]) -> int | None:
    """Returns the maximum number of tokens of the reasoning, or None for -1 and in
    completions, which have no reasoning."""
    values = {n: _integer(fields, n, None, -1, MOST_TOKENS) for n in BUDGETS}
    given = [value for value in values.values() if value is not None]
    return None if kind == "completion" or given[:1] in ([], [-1]) else given[0]


def _logit_bias(fields: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Returns pairs of a token and its bias: from an object, whose keys are token ids
    as texts, or from llama.cpp's list of pairs, in which false forbids a token."""
    value = fields.get("logit_bias", {})
    pairs = list(value.items()) if isinstance(value, dict) else value
    wanted = f"want an object of token ids and numbers in -{MOST_BIAS}..{MOST_BIAS}"
    if not isinstance(pairs, list):
        raise invalid(f"logit_bias: {wanted}, got {shown(value)}", "logit_bias")
    if len(pairs) > MAX_BIASES:
        problem = f"logit_bias: want at most {MAX_BIASES} tokens, got {len(pairs)}"
        raise invalid(problem, "logit_bias")
    found = {}
    for pair in pairs:
        token, bias = (
            pair if isinstance(pair, list | tuple) and len(pair) == 2 else ("", 0)
        )
        if isinstance(token, str) and ID.fullmatch(token):
            token = int(token)
        if bias is False and isinstance(value, list):
            bias = -FORBIDDING
        elif not _is_number(bias) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise invalid(f"logit_bias: {wanted}, got {shown(bias)}", "logit_bias")
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise invalid(f"logit_bias: {wanted}, got {shown(token)}", "logit_bias")
        found[token] = float(bias)
    return tuple(sorted((token, bias) for token, bias in found.items() if bias))


def _stop_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens that end an answer in addition to the model's own."""
    value = fields.get("stop_token_ids", [])
    if value != [] and not _are_ids(value):
        problem = f"stop_token_ids: want a list of token ids, got {shown(value)}"
        raise invalid(problem, "stop_token_ids")
    ids = tuple(dict.fromkeys(value))
    if len(ids) > MAX_STOP_IDS:
        problem = f"stop_token_ids: want at most {MAX_STOP_IDS}, got {len(ids)}"
        raise invalid(problem, "stop_token_ids")
    return ids


def _turn(fields: Mapping[str, Any]) -> Turn:
    """Returns the settings for the end of a chat in the template."""
    begins = _boolean(fields, "add_generation_prompt", True)
    continues = _boolean(fields, "continue_final_message")
    if continues and fields.get("add_generation_prompt"):
        name = "continue_final_message"
        problem = f"{name}: set add_generation_prompt to false, or leave it out"
        raise invalid(problem, name)
    name = "chat_template_kwargs"
    variables = fields.get(name, {})
    own = ("messages", "tools", "documents", "add_generation_prompt")
    if not isinstance(variables, dict) or any(key in own for key in variables):
        raise invalid(f"{name}: want an object without {', '.join(own)}", name)
    effort = fields.get("reasoning_effort")
    if effort is not None and not is_text(effort):
        raise invalid("reasoning_effort: want a text", "reasoning_effort")
    if effort is not None:  # some templates, such as gpt-oss', have this variable
        variables = {"reasoning_effort": effort} | variables
    return Turn(begins and not continues, continues, variables)


def _split_reasoning(fields: Mapping[str, Any]) -> bool:
    """Returns False if the reasoning of an answer stays in its content, by llama.cpp's
    or SGLang's field."""
    kinds = ("auto", "none", "deepseek")
    kind = fields.get("reasoning_format", "auto")
    if kind not in kinds:
        problem = f"want one of {', '.join(kinds)}, got {shown(kind)}"
        raise invalid(f"reasoning_format: {problem}", "reasoning_format")
    return kind != "none" and _boolean(fields, "separate_reasoning", True)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the stop strings. Empty ones, which some clients send for an empty form
    field, are ignored, as in llama.cpp."""
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(f"stop: want a string, or a list of up to {MAX_STOPS}", "stop")
    for stop in stops:
        if not is_text(stop) or len(stop.encode()) > MAX_STOP_BYTES:
            problem = f"stop: want strings of up to {MAX_STOP_BYTES} bytes"
            raise invalid(problem, "stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _prompts(fields: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    """Returns the prompts of a completion, as texts or token ids."""
    value = fields.get("prompt")
    if value is None:
        raise invalid("you must provide a prompt", "prompt")
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    good = isinstance(value, list) and value
    if not good or not all(is_text(p) or _are_ids(p) for p in value):
        raise invalid("prompt: want a text, token ids, or a list of either", "prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in value)


def _are_ids(value: Any) -> bool:
    """True for a non-empty list of integers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    """Returns the number of alternatives in a completion's log-probabilities, or None
    if it has no log-probabilities."""
    if fields.get("logprobs") is False:
        return None
    return _integer(fields, "logprobs", None, 0, 20)


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    """Returns the number of alternatives in a chat's log-probabilities, or None if it
    has no log-probabilities."""
    wanted = _boolean(fields, "logprobs")
    top = _integer(fields, "top_logprobs", None, 0, 20)
    if top and not wanted:
        raise invalid("top_logprobs: requires logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    """Returns True if a stream ends with the usage. Without `stream`, which has the
    usage anyway, the options have no effect, as in llama.cpp."""
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options: want an object", "stream_options")
    on = {k for k, v in options.items() if v is not None and v is not False}
    if unknown := on - {"include_usage", "include_obfuscation"}:
        name = min(unknown)
        problem = f"stream_options.{name}: this server does not support it"
        raise invalid(problem, f"stream_options.{name}")
    wanted = options.get("include_usage") is not None
    return wanted and _boolean(options, "include_usage") and stream
