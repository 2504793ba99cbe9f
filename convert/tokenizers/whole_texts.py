"""Switches off truncation, padding and dropout of tokenizers.

A tokenizer.json that was saved during training keeps the truncation, padding and
dropout of the training, and the `tokenizers` library applies them to every text.
transformers and vLLM do not.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def for_whole_texts(tokenizer: "Tokenizer") -> "Tokenizer":
    """Returns the tokenizer without truncation, padding and dropout.

    Returns the object itself if it has none of these, and otherwise a copy, because the
    caller may need its own settings elsewhere.
    """
    if _encodes_whole_texts(tokenizer):
        return tokenizer
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    set_for_whole_texts(copy)
    return copy


def set_for_whole_texts(tokenizer: "Tokenizer") -> None:
    """Switches off truncation, padding and dropout of the tokenizer in place."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def _encodes_whole_texts(tokenizer: "Tokenizer") -> bool:
    if getattr(tokenizer, "encodes_whole_texts", False):  # not built yet, in parts
        return True
    limits = (tokenizer.truncation, tokenizer.padding)
    return limits == (None, None) and not getattr(tokenizer.model, "dropout", None)
