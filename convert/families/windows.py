"""Attention that differs between layers, in several families: sliding windows and
rotary embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.table import require
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, ModelConfig
from stree_jax.models.configs.rope import Rope
from stree_jax.models.stack.config import blocks

WINDOW, CHUNK = "sliding_window", "attention_chunk_size"
SLIDES = "sliding_attention"
NEAR = "attention_near"  # our name of the mixer with a window
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
KINDS: dict[str, str] = {"full_attention": "attention", SLIDES: "attention"}


def window_of(fields: ConfigFields, default: int | None) -> int | None:
    """Returns the window of a layer in tokens, or None if it has no window.

    Args:
      fields: the fields of the config file.
      default: window of the class if the field is absent. If the field is null, there
        is no window.
    """
    if fields.values.get(WINDOW, default) is None:
        return None
    return fields.size(WINDOW, default)


def needed_window(fields: ConfigFields, default: int) -> int:
    """Returns the window of a class that makes a mask of it in any case.

    Raises:
      CheckpointError: the field is null.
    """
    window = window_of(fields, default)
    if window is None:
        raise fields.wants(WINDOW, "a number of tokens", window)
    return window


def check_window(
    fields: ConfigFields,
    window: int | None,
    longest: int,
    remedy: str,
    name: str = WINDOW,
) -> None:
    """Raises CheckpointError if a window is shorter than the model's context length.

    Args:
      fields: the fields of the config file.
      window: the window in tokens, or None.
      longest: the class's default of `max_position_embeddings`.
      remedy: how to load the model for shorter texts, for the message.
      name: name of the field that has the window.
    """
    if window is None or window >= fields.size("max_position_embeddings", longest):
        return
    raise fields.error(
        name,
        f"attention to the last {window} tokens only is not supported; "
        f"for texts of up to {window} tokens {remedy}",
    )


def check_llama_windows(fields: ConfigFields) -> None:
    """Checks for short windows in llama configs, which the class ignores.

    transformers nevertheless applies the config's window to the KV cache, so decoding
    token by token gives other results than a forward pass over the whole text.

    Raises:
      CheckpointError: a window is shorter than the context length.
    """
    if not fields.flag("use_sliding_window", True):
        return
    for name in (WINDOW, CHUNK):
        if fields.get(name, None) is not None:
            remedy = f'set "{name}" to null in config.json'
            check_window(fields, fields.size(name), 2048, remedy, name)


def effective(fields: ConfigFields, window: int | None, longest: int) -> int:
    """Returns a window in tokens, or 0 if it hides nothing within the model's context
    length.

    Args:
      fields: the fields of the config file.
      window: the window, or None.
      longest: the class's default of `max_position_embeddings`.
    """
    if window is None or window >= fields.size("max_position_embeddings", longest):
        return 0
    return window


def with_qwen_windows(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    """Adds the windows of Qwen2 and Qwen3, where only some layers have one.

    Args:
      fields: the fields of the config file.
      config: the config without windows. Layers with a window get the mixer
        "attention_near" instead of "attention".

    Raises:
      CheckpointError: a layer has a window, but no window is in use.
    """
    layers = len(config.layers) // 2
    used = fields.flag("use_sliding_window", False)
    window = window_of(fields, 4096) if used else None
    if fields.get("layer_types", None) is None:
        above = fields.size("max_window_layers", 28, low=0) if used else layers
        slides = [i >= above for i in range(layers)]
    else:
        slides = sliding_layers(fields, window, layers)
    size = effective(fields, window, 32768)
    if not size or not any(slides):
        return config
    names = [NEAR if near else "attention" for near in slides]
    pairs = zip(names, config.kinds[1::2], strict=True)
    mixers = dict(config.mixers)
    mixers[NEAR] = replace(mixers["attention"], window=size)
    if all(slides):
        del mixers["attention"]
    each = tuple(name for pair in pairs for name in pair)
    return replace(config, layers=blocks(each), mixers=mixers)


def sliding_layers(fields: ConfigFields, window: int | None, count: int) -> list[bool]:
    """Reads from `layer_types` whether each of `count` layers has a window.

    Raises:
      CheckpointError: a layer has a window, but `window` is None.
    """
    hf.counted_layers(fields, "layer_types", KINDS, count)
    slides = [kind == SLIDES for kind in fields.get("layer_types")]
    if any(slides) and window is None:
        problem = f'"{SLIDES}", but no window is in use; want "full_attention"'
        raise fields.error("layer_types", problem)
    return slides


def attention_mixers(
    each: Sequence[AttentionConfig],
) -> tuple[hf.Layers, dict[str, AttentionConfig]]:
    """Names the different mixers among the attention of a model's layers.

    Args:
      each: the attention of each layer.

    Returns:
      The name of each layer's mixer, and the mixers by name. A name begins with
      "attention", or "attention_near" if the mixer has a window, and "_nope" follows
      if it has no rotary embedding. Further mixers of the same kind are numbered.
    """
    names: dict[AttentionConfig, str] = {}
    for c in dict.fromkeys(each):
        name = NEAR if c.window else "attention"
        name += "" if c.rope else "_nope"
        number = 1 + sum(_alike(c, other) for other in names)
        names[c] = name if number == 1 else f"{name}_{number}"
    return tuple(names[c] for c in each), {name: c for c, name in names.items()}


def _alike(c: AttentionConfig, other: AttentionConfig) -> bool:
    return (c.window > 0, c.rope is None) == (other.window > 0, other.rope is None)


def has_usual_names(config: ModelConfig) -> bool:
    """True if every other layer is attention, whose mixers have the names that
    `attention_mixers` gives them."""
    kinds = config.kinds[::2]
    found = (config.mixers.get(kind) for kind in kinds)
    each = [c for c in found if isinstance(c, AttentionConfig)]
    return len(each) == len(kinds) and attention_mixers(each)[0] == kinds


def layer_attention(
    format: str, config: ModelConfig
) -> tuple[list[AttentionConfig], AttentionConfig, int]:
    """Returns the attention of each layer, for exports.

    Args:
      format: the family, for messages.
      config: a model of alternating attention and MLPs or experts.

    Returns:
      The config of each layer's attention; the options that all share, without window
      and rotary embedding; the window of the layers that have one, or 0.

    Raises:
      CheckpointError: the layers differ in more than window and rotary embedding, or
        there are windows of several sizes.
    """
    each = [config.mixers[block.mixers[0]] for block in config.layers[::2]]
    shared = {replace(c, rope=None, window=0) for c in each}
    windows = {c.window for c in each} - {0}
    require(
        format,
        {
            "attention of two sizes": len(shared) == 1,
            "windows of two sizes": len(windows) < 2,
        },
    )
    return each, shared.pop(), max(windows, default=0)


def typed_rope(
    fields: ConfigFields,
    kind: str,
    head_dim: int,
    theta: float,
    default: Mapping[str, Any] = NO_FIELDS,
    older: Mapping[str, Any] = NO_FIELDS,
    partial: float | None = None,
) -> Rope:
    """Reads the rotary embedding of one type of layers, in families where types differ.

    Args:
      fields: the fields of the config file.
      kind: the type of layers, a key of `rope_parameters`.
      head_dim: size of a head.
      theta: base of the frequencies if its parameters have none.
      default: its parameters if the config has no `rope_parameters`.
      older: fields of `rope_scaling` for this type, which take precedence.
      partial: see `hf.rope`.
    """
    name = "rope_parameters"
    parameters = fields.object(name)
    if flat := [k for k, v in parameters.values.items() if not isinstance(v, dict)]:
        raise parameters.error(flat[0], "want an object for every type of layers")
    own = parameters.object(kind).values if parameters.values else default
    others = {
        key: value
        for key, value in fields.values.items()
        if key not in ("rope_scaling", "rope_theta", "partial_rotary_factor")
    }
    values = {**others, name: {"rope_theta": theta, **own, **older}}
    return hf.rope(replace(fields, values=values), head_dim, partial)


def typed_rope_fields(format: str, rope: Rope) -> dict[str, Any]:
    """Returns the parameters of one type of layers; the inverse of `typed_rope`."""
    if rope.share < 1:
        plain = replace(rope, share=1.0, linear=1.0)
        require(format, {"rotary scaling": not hf.scaling_fields(format, plain)})
        values = {"rope_type": "proportional", "partial_rotary_factor": rope.share}
        values |= {"factor": rope.linear} if rope.linear != 1 else {}
    else:
        values = hf.scaling_fields(format, rope) or {"rope_type": "default"}
    return {**values, "rope_theta": rope.theta}
