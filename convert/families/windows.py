"""Sliding-window attention: accepted if the window has no effect, an error
otherwise."""

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.fields import ConfigFields

WINDOW, CHUNK = "sliding_window", "attention_chunk_size"
SLIDES = "sliding_attention"
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
    """Checks the windows of llama, a class without sliding windows.

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


def check_qwen_windows(fields: ConfigFields, layers: int) -> None:
    """Checks the windows of Qwen2 and Qwen3, where only the upper layers have one.

    Raises:
      CheckpointError: a layer's window is shorter than the context length.
    """
    used = fields.flag("use_sliding_window", False)
    window = window_of(fields, 4096) if used else None
    remedy = 'set "use_sliding_window" to false'
    if fields.get("layer_types", None) is None:
        slides = fields.size("max_window_layers", 28, low=0) < layers
    else:
        hf.counted_layers(fields, "layer_types", KINDS, layers)
        slides = SLIDES in fields.get("layer_types")
        remedy += ' and all "layer_types" to "full_attention"'
        if slides and window is None:
            raise fields.error(
                "layer_types",
                f'"{SLIDES}", but no window is in use; want "full_attention"',
            )
    if slides:
        check_window(fields, window, 32768, remedy + " in config.json")
