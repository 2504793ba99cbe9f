"""Reads tokenizers from vocab.json and merges.txt, for directories without a
tokenizer.json.

Old repositories with byte-level BPE have only these two files. The tokenizer's class
then determines the pre-tokenizer; it is in tokenizer_config.json, or follows from the
model's family.

Source: transformers' classes of these names (5.23).
"""

from typing import TYPE_CHECKING

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.pretokenizers import QWEN2, QWEN35
from stree_jax.convert.tokenizers.special_tokens import (
    SpecialTokens,
    add_special_tokens,
    tokenizer_class,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

VOCAB, MERGES = "vocab.json", "merges.txt"
# By class: the expression that finds words (None for GPT-2's), and True for NFC
# normalization.
CLASSES: dict[str, tuple[str | None, bool]] = {
    "GPT2Tokenizer": (None, False),
    "GPTNeoXTokenizer": (None, True),
    "Qwen2Tokenizer": (QWEN2, True),
    "Qwen3_5Tokenizer": (QWEN35, True),
}


def class_of(files: CheckpointFiles) -> str | None:
    """Returns the tokenizer's class, one of `CLASSES`. None if the directory lacks
    vocab.json or merges.txt, or if the class is unknown."""
    if not (files.has(VOCAB) and files.has(MERGES)):
        return None
    name = tokenizer_class(files)
    return name if name in CLASSES else None


def class_parts(name: str, space: bool) -> tuple["Normalizer | None", "PreTokenizer"]:
    """Returns the normalizer and pre-tokenizer of a class.

    Args:
      name: the class, one of `CLASSES`.
      space: True if a space is put before each text (`add_prefix_space`).
    """
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    expression, composed = CLASSES[name]
    normalizer = normalizers.NFC() if composed else None
    letters = ByteLevel(add_prefix_space=space, use_regex=expression is None)
    if expression is None:
        return normalizer, letters
    return normalizer, Sequence([Split(Regex(expression), "isolated"), letters])


def read_vocab_files(
    files: CheckpointFiles, name: str, settings: ConfigFields, special: SpecialTokens
) -> "Tokenizer":
    """Reads the tokenizer from vocab.json and merges.txt.

    Args:
      files: the checkpoint.
      name: the tokenizer's class, from `class_of`.
      settings: fields of tokenizer_config.json.
      special: special tokens from other files, which are added to the tokenizer.

    Raises:
      CheckpointError: a file is malformed.
    """
    from tokenizers import Tokenizer, decoders, models

    both = str(files.path / VOCAB), str(files.path / MERGES)
    try:
        model = models.BPE(*models.BPE.read_file(*both))
    except Exception as error:  # the Rust library raises plain Exception
        where = f"{files.path}: {VOCAB} and {MERGES}"
        raise CheckpointError(f"{where}: not a tokenizer ({error})") from error
    tokenizer = Tokenizer(model)
    space = settings.flag("add_prefix_space", False)
    tokenizer.normalizer, tokenizer.pre_tokenizer = class_parts(name, space)
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, special)
    _add_around(tokenizer, settings, special)
    return tokenizer


def _add_around(
    tokenizer: "Tokenizer", settings: ConfigFields, special: SpecialTokens
) -> None:
    """Adds the tokens that begin and end a text, by `add_bos_token` and
    `add_eos_token`."""
    from tokenizers.processors import TemplateProcessing

    texts = {}
    for role in ("bos", "eos"):
        text = special.named.get(f"{role}_token")
        if settings.flag(f"add_{role}_token", False) and text is not None:
            texts[role] = text
    if texts:
        first, last = ([texts[r]] if r in texts else [] for r in ("bos", "eos"))
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in texts.values()],
        )
