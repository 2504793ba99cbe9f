"""Sliding windows of attention: read where they change nothing, refused elsewhere."""

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.fields import ConfigFields

WINDOW, CHUNK = "sliding_window", "attention_chunk_size"
SLIDES = "sliding_attention"
KINDS: dict[str, str] = {"full_attention": "attention", SLIDES: "attention"}


def window_of(fields: ConfigFields, default: int | None) -> int | None:
    """Returns how many tokens a layer with a window sees, or None if it sees all.

    Args:
      default: the class's window if the config has no such field. A null in the config
        means that there is no window, whatever the default.
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
    """Refuses a window that hides tokens of texts that the model is made for.

    Args:
      longest: the class's `max_position_embeddings` if the config does not say.
      remedy: how to load the model for shorter texts.
      name: of the field that has the window.
    """
    if window is None or window >= fields.size("max_position_embeddings", longest):
        return
    raise fields.error(
        name,
        f"attention to the last {window} tokens only is not supported; "
        f"for texts of up to {window} tokens {remedy}",
    )


def check_llama_windows(fields: ConfigFields) -> None:
    """Checks the windows of llama, whose class has none.

    transformers gives its cache the window of the config all the same, so that tokens
    that are decoded one by one do not see what a whole text does.

    Raises:
      CheckpointError: a window would hide tokens.
    """
    if not fields.flag("use_sliding_window", True):
        return
    for name in (WINDOW, CHUNK):
        if fields.get(name, None) is not None:
            remedy = f'set "{name}" to null in config.json'
            check_window(fields, fields.size(name), 2048, remedy, name)


def check_qwen_windows(fields: ConfigFields, layers: int) -> None:
    """Checks the windows of Qwen2 and Qwen3, which only the upper layers have.

    Raises:
      CheckpointError: some layer's window would hide tokens.
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
