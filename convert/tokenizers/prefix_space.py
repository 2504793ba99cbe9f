"""Applies the setting `add_prefix_space` of tokenizer_config.json to a tokenizer.

transformers' classes for GPT-2, GPT-NeoX, Qwen2, Llama and CodeLlama follow this
setting, even if tokenizer.json contradicts it. Its other classes ignore the setting.
"""

import json
from typing import TYPE_CHECKING, Any

from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.vocab_files import CLASSES as BYTE_LEVEL_CLASSES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer")
SETTING = "add_prefix_space"
Part = dict[str, Any]


def with_prefix_space(
    tokenizer: "Tokenizer", name: str, settings: ConfigFields
) -> "Tokenizer":
    """Returns the tokenizer with the `add_prefix_space` of the settings.

    Args:
      tokenizer: the tokenizer from tokenizer.json.
      name: the class, a result of `rebuilding_class`.
      settings: fields of tokenizer_config.json.
    """
    if settings.get(SETTING, None) is None:
        return tokenizer
    wanted = settings.flag(SETTING, False)
    if name not in BYTE_LEVEL_CLASSES and (name not in PIECE_CLASSES or wanted):
        return tokenizer
    values = json.loads(tokenizer.to_str())
    before = json.dumps(values)
    if name in BYTE_LEVEL_CLASSES:
        for part in _parts(values["pre_tokenizer"], "pretokenizers"):
            if part["type"] == "ByteLevel":
                part[SETTING] = wanted
    else:
        _without_prefix(values)
    if json.dumps(values) == before:
        return tokenizer
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(values))


def _without_prefix(values: Part) -> None:
    """Edits the tokenizer.json of a SentencePiece tokenizer so that encoding adds no
    space and decoding removes none."""
    if not any(
        part["type"] == "Fuse" for part in _parts(values["decoder"], "decoders")
    ):
        return  # not a SentencePiece tokenizer
    for part in _parts(values["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
    normalizer = values["normalizer"]
    kept = [p for p in _parts(normalizer, "normalizers") if p["type"] != "Prepend"]
    if normalizer is not None and normalizer["type"] == "Sequence":
        normalizer["normalizers"] = kept
    elif not kept:
        values["normalizer"] = None
    decoder = values["decoder"]
    if decoder["type"] == "Sequence":
        decoder["decoders"] = [p for p in decoder["decoders"] if p["type"] != "Strip"]


def _parts(part: Part | None, name: str) -> list[Part]:
    """Returns the components of a part of a tokenizer: those of a sequence, or
    itself."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]
