"""Converts a `ModelConfig` to JSON and back, and checks the range of its numbers."""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from stree_jax.models.configs import MIXERS, mixer_of
from stree_jax.models.stack.config import Block, ModelConfig

# Limits on numbers from a file. Real models are far below them.
MAX_SIZE = 1 << 24  # widths, counts and the vocabulary
MAX_LAYERS = 1024
MAX_ITEMS = 2 * MAX_LAYERS  # items of a list; a layer may be two blocks, mixer and MLP
MAX_TAPS = 64  # taps of a convolution, whose loop is unrolled
MAX_NUMBER = 1e30  # floats; products of a few of them do not overflow float32
KIND = "kind"  # key of the mixer's kind, next to its fields


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a config by name, ready for `json.dumps`.

    Tuples become lists, infinity becomes "inf", blocks are in text form, and each
    mixer's kind is stored under "kind" next to its fields.
    """
    values = {
        field.name: plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
    }
    mixers = {
        name: {KIND: mixer_of(c).kind, **plain(c)} for name, c in config.mixers.items()
    }
    layers, mtp = (list(map(str, blocks)) for blocks in (config.layers, config.mtp))
    return {**values, "layers": layers, "mtp": mtp, "mixers": mixers}


def plain(value: Any) -> Any:
    """Converts a config, or a value of one of its fields, for `json.dumps`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return "inf" if value == math.inf else value


def from_json(values: Any, kind: type[ModelConfig] = ModelConfig) -> ModelConfig:
    """Builds the config from JSON that `to_json` of this or an earlier version wrote.

    Args:
      values: the fields.
      kind: `ModelConfig`, or the subclass that was written.

    Raises:
      ValueError, TypeError, ArithmeticError: a field is unknown, missing or out of
        range.
    """
    if isinstance(values, dict) and "mixers" not in values:
        values = _from_version_1(values)
    config: ModelConfig = typed(kind, values, "model")
    _check_numbers(config)
    for name, c in config.mixers.items():
        mixer = mixer_of(c)
        mixer.check(c, f"model.mixers.{name}")
        if mixer.conv_taps(c) > MAX_TAPS:
            raise ValueError(f"model.mixers.{name}.d_conv: {c.d_conv} does not fit")
    return config


# Version 1 of the format has one config per mixer kind. Its layers are names, some of
# which mean two mixers or a shared block.
EARLIER_KINDS = {
    "mamba": "mamba2",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
EARLIER_LAYERS = {"parallel": "mamba+attention", "shared": "mamba+shared"}


def _from_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Converts a config of version 1 to the current version."""
    values, mixers = dict(values), {}
    for name, kind in EARLIER_KINDS.items():
        options = values.pop(name, None)
        if isinstance(options, dict):
            mixers[name] = {KIND: kind, **options}
        elif options is not None:
            raise ValueError(f"model.{name}: {reprlib.repr(options)} does not fit")
    for field in ("layers", "mtp"):
        kinds = values.get(field)
        if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            values[field] = [EARLIER_LAYERS.get(kind, kind) for kind in kinds]
    return {**values, "mixers": mixers}


def _check_numbers(config: ModelConfig) -> None:
    """Raises ValueError for invalid numbers that no parameter shape would reveal."""
    if not 0 < config.num_tokens <= config.vocab_size:
        raise ValueError(f"model.num_tokens: want 1..{config.vocab_size}")
    if not 0 < config.norm_eps < math.inf:
        raise ValueError(f"model.norm_eps: {config.norm_eps} does not fit")
    if not 0 < abs(config.logits_divisor) < math.inf:
        raise ValueError(f"model.logits_divisor: {config.logits_divisor} does not fit")
    if not 0 <= config.logits_cap < math.inf:
        raise ValueError(f"model.logits_cap: {config.logits_cap} does not fit")


def _mixer(value: Any, name: str) -> Any:
    """Builds a mixer's config from its kind and its fields."""
    if not isinstance(value, dict) or value.get(KIND) not in MIXERS:
        kind = value.get(KIND) if isinstance(value, dict) else value
        known = ", ".join(MIXERS)
        raise ValueError(f"{name}.{KIND}: {reprlib.repr(kind)}; known: {known}")
    options = {k: v for k, v in value.items() if k != KIND}
    return typed(MIXERS[value[KIND]].Config, options, name)


def typed(hint: Any, value: Any, name: str) -> Any:
    """Converts what `plain` returned, read from JSON, back to a config or to a value of
    one of its fields.

    Args:
      hint: the type of the config or of the field.
      value: the value from JSON.
      name: its name in messages.

    Raises:
      ValueError: it does not fit the type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if type(None) in args:
        return None if value is None else typed(args[0], value, name)
    if hint is Block and isinstance(value, str):
        return Block.parse(value)
    if origin is Mapping and isinstance(value, dict) and len(value) <= MAX_ITEMS:
        if args[1] is Any:
            return {k: _mixer(v, f"{name}.{k}") for k, v in value.items()}
        return {k: typed(args[1], v, f"{name}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"{name}.{min(unknown)}: unknown field")
        fields = {k: typed(hints[k], v, f"{name}.{k}") for k, v in value.items()}
        return cast(Any, hint)(**fields)
    if origin is tuple and isinstance(value, list) and len(value) <= MAX_ITEMS:
        if args[-1] is Ellipsis:
            args = args[:1] * len(value)
        return tuple(
            typed(arg, v, f"{name}[{i}]")
            for i, (arg, v) in enumerate(zip(args, value, strict=True))
        )
    if hint is float and value == "inf":
        return math.inf
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and abs(value) <= MAX_NUMBER:  # False for NaN
        return float(value)
    if hint is int and type(value) is int and 0 <= value <= MAX_SIZE:
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if origin is Literal and value in args:
        return value
    raise ValueError(f"{name}: {reprlib.repr(value)} does not fit")
