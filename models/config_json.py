"""A `ModelConfig` as JSON and back, and the limits of its numbers."""

import dataclasses
import math
import reprlib
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from stree_jax.models.config import AttentionConfig, ModelConfig, Rope

MAX_SIZE = 1 << 24  # no width, count or vocabulary of a real model is above this
MAX_LAYERS = 1024
MAX_ITEMS = 2 * MAX_LAYERS  # of a list; a layer is a mixer and an MLP
MAX_TAPS = 64  # of the convolution, which is unrolled
MAX_NUMBER = 1e30  # room to multiply in float32


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Fields by name; tuples are lists, and infinity is "inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return "inf" if value == math.inf else value

    return plain(dataclasses.asdict(config))


def from_json(values: Any) -> ModelConfig:
    """The config that `to_json` wrote.

    Raises:
      ValueError, TypeError, ArithmeticError: a field is unknown, missing or of no use.
    """
    config = _typed(ModelConfig, values, "model")
    _check_numbers(config)
    if config.conv_taps > MAX_TAPS:
        raise ValueError(f"model.mamba.d_conv: {config.conv_taps} does not fit")
    return config


def _check_numbers(config: ModelConfig) -> None:
    """Sizes and scales that no parameter's shape shows; raises ValueError."""
    if not 0 < config.num_tokens <= config.vocab_size:
        raise ValueError(f"model.num_tokens: want 1..{config.vocab_size}")
    if not 0 < config.norm_eps < math.inf:
        raise ValueError(f"model.norm_eps: {config.norm_eps} does not fit")
    if not 0 < abs(config.logits_divisor) < math.inf:
        raise ValueError(f"model.logits_divisor: {config.logits_divisor} does not fit")
    if config.attention is not None:
        _check_attention(config.attention)
    low, high = config.mamba.dt_limit if config.mamba else (0.0, math.inf)
    if not 0 <= low <= high:
        raise ValueError(f"model.mamba.dt_limit: want 0 <= low <= high: {low}, {high}")


def _check_attention(c: AttentionConfig) -> None:
    eps = c.qk_norm_eps
    if eps is not None and not 0 < eps < math.inf:
        raise ValueError(f"model.attention.qk_norm_eps: {eps} does not fit")
    if c.rope is not None:
        _check_rope(c.rope)


def _check_rope(rope: Rope) -> None:
    """Raises ValueError if a frequency would be divided by zero."""
    if not 0 < rope.linear < math.inf:
        raise ValueError(f"model.attention.rope.linear: {rope.linear} does not fit")
    if (yarn := rope.yarn) is None:
        return
    numbers = (yarn.factor, yarn.original_length, yarn.beta_fast, yarn.beta_slow)
    if rope.theta in (0.0, 1.0) or not all(0 < n < math.inf for n in numbers):
        raise ValueError(f"model.attention.rope.yarn: {yarn} does not fit")


def _typed(hint: Any, value: Any, name: str) -> Any:
    """A JSON value as the type of a config's field; raises ValueError, naming it."""
    origin, args = get_origin(hint), get_args(hint)
    if type(None) in args:
        return None if value is None else _typed(args[0], value, name)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"{name}.{min(unknown)}: unknown field")
        typed = {k: _typed(hints[k], v, f"{name}.{k}") for k, v in value.items()}
        return cast(Any, hint)(**typed)
    if origin is tuple and isinstance(value, list) and len(value) <= MAX_ITEMS:
        if args[-1] is Ellipsis:
            args = args[:1] * len(value)
        return tuple(
            _typed(arg, v, f"{name}[{i}]")
            for i, (arg, v) in enumerate(zip(args, value, strict=True))
        )
    if hint is float and value == "inf":
        return math.inf
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and abs(value) <= MAX_NUMBER:  # so not NaN
        return float(value)
    if hint is int and type(value) is int and 0 <= value <= MAX_SIZE:
        return value
    if (hint is bool and isinstance(value, bool)) or (
        origin is Literal and value in args
    ):
        return value
    raise ValueError(f"{name}: {reprlib.repr(value)} does not fit")
