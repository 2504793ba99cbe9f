"""Applies `fix_mistral_regex` of tokenizer_config.json.

Some tokenizer.json files of Mistral models split words at the wrong places: they were
converted with another expression than that of the models' tekken.json. With this
setting, which transformers 4.57 and later write, the right expression replaces it.

Source: `_patch_mistral_regex` in transformers' tokenization_utils_tokenizers.py (5.23).
"""

import re
from typing import TYPE_CHECKING, Any, cast

from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.pretokenizers import TEKKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SETTING = "fix_mistral_regex"
FAMILIES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MIN_TOKENS = 100_000  # vocabularies up to this size are older and unaffected


def set_mistral_words(
    tokenizer: "Tokenizer", files: CheckpointFiles, settings: ConfigFields
) -> bool:
    """Replaces the expression that finds words, if the settings ask for it. Returns
    True if it was replaced.

    Args:
      tokenizer: the tokenizer, which is changed in place.
      files: the checkpoint.
      settings: fields of tokenizer_config.json.

    Raises:
      CheckpointError: the setting is not true or false.
    """
    if not settings.flag(SETTING, False) or not _is_affected(tokenizer, files):
        return False
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split

    words, current = Split(Regex(TEKKEN), "isolated"), tokenizer.pre_tokenizer
    if isinstance(current, Sequence):
        # It can be iterated, which its types do not say.
        parts = [words, *list(cast(Any, current))[1:]]
    elif isinstance(current, Metaspace):
        parts = [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        parts = [words, current]
    tokenizer.pre_tokenizer = Sequence(parts)
    return True


def _is_affected(tokenizer: "Tokenizer", files: CheckpointFiles) -> bool:
    """True for a large vocabulary of a Mistral model saved before transformers 5."""
    if tokenizer.pre_tokenizer is None or not files.has(CONFIG):
        return False
    if tokenizer.get_vocab_size() <= MIN_TOKENS:
        return False
    config = files.json()
    family = config.get("model_type")
    return (family is None or family in FAMILIES) and before_version_5(
        config.get("transformers_version")
    )


def before_version_5(version: object) -> bool:
    """True if a version is below 5.0.0 or absent. Pre-releases of 5.0.0 are below."""
    if not isinstance(version, str) or not version:
        return True
    major = re.match(r"\D*(\d+)", version)
    if major is None or int(major[1]) != 5:
        return major is not None and int(major[1]) < 5
    return re.match(r"5(\.0)*[.\-_]?(dev|a|b|c|rc|alpha|beta|pre)", version) is not None
