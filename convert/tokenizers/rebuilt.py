"""Finds texts that transformers encodes differently, because it rebuilds a tokenizer.

Some tokenizer classes of transformers 5 take only the vocabulary and the merges from
tokenizer.json, and define the normalizer and the pre-tokenizer themselves. This library
uses tokenizer.json as it is. Where the two disagree, a warning names a text.

Source: transformers' classes of these names, `convert_to_native_format` in
tokenization_utils_tokenizers.py and `AutoTokenizer.from_pretrained` (5.23).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.special_tokens import token_text, tokenizer_class
from stree_jax.convert.tokenizers.vocab_files import CLASSES, class_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

LLAMA, CODE_LLAMA = "LlamaTokenizer", "CodeLlamaTokenizer"
PIECE_CLASSES = (LLAMA, CODE_LLAMA, "GemmaTokenizer")
SPACE = "\u2581"  # SentencePiece's symbol for a space
# Texts that the classes tokenize differently: words, digits, spaces, marks, composed
# characters.
TEXTS = (
    "Hello world, it's 12345 o'clock!",
    "  two spaces,\n\n\ta tab \r\n",
    "WE'LL eBay camelCase x=3.14/2;",
    "e\u0301te\u0301 u\u0308ber \u00fcber",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u3053\u3093 \u043c\u0438\u0440",
)


def rebuilding_class(tokenizer: "Tokenizer", files: CheckpointFiles) -> str:
    """Returns the name of the class from which transformers rebuilds a tokenizer.json,
    or an empty string if transformers uses the file as it is."""
    name = tokenizer_class(files)
    if name == LLAMA and _is_byte_level(tokenizer):
        return ""
    return name if name in (*CLASSES, *PIECE_CLASSES) else ""


def disagreement(tokenizer: "Tokenizer", name: str, settings: ConfigFields) -> str:
    """Returns a text that transformers encodes differently, or an empty string.

    Args:
      tokenizer: the tokenizer from tokenizer.json. It is unchanged afterwards.
      name: result of `rebuilding_class`.
      settings: fields of tokenizer_config.json.
    """
    if type(tokenizer.model).__name__ != "BPE":  # the classes have no other model
        return ""
    added = tokenizer.get_added_tokens_decoder().values()
    special = next((token.content for token in added if token.special), "")
    texts = (*TEXTS, f"a{special}b{special} c")
    ours = _ids(tokenizer, texts, around=name == CODE_LLAMA)
    with _as_rebuilt(tokenizer, *_parts(name, settings)):
        theirs = _ids(tokenizer, texts)
    if name == CODE_LLAMA:  # the class puts the BOS token before each text
        begin = token_text(settings.get("bos_token", None)) or "<s>"
        bos = tokenizer.token_to_id(begin)
        theirs = [[*([] if bos is None else [bos]), *ids] for ids in theirs]
    pairs = zip(texts, ours, theirs, strict=True)
    return next((text for text, a, b in pairs if a != b), "")


def _ids(
    tokenizer: "Tokenizer", texts: tuple[str, ...], *, around: bool = False
) -> list[list[int]]:
    """Returns the ids of the texts, empty for a text that cannot be encoded.

    Args:
      tokenizer: the tokenizer.
      texts: the texts.
      around: True to include the tokens that begin and end a text.
    """
    found = []
    for text in texts:
        try:
            found.append(tokenizer.encode(text, add_special_tokens=around).ids)
        except Exception:  # the Rust library raises plain Exception
            found.append([])
    return found


@contextmanager
def _as_rebuilt(
    tokenizer: "Tokenizer",
    normalizer: "Normalizer | None",
    pre_tokenizer: "PreTokenizer",
) -> Iterator[None]:
    """Replaces the parts that transformers replaces. A copy of a large vocabulary would
    take a second."""
    before = tokenizer.normalizer, tokenizer.pre_tokenizer
    whole_words = getattr(tokenizer.model, "ignore_merges", None)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    if whole_words:
        tokenizer.model.ignore_merges = False
    try:
        yield
    finally:
        tokenizer.normalizer, tokenizer.pre_tokenizer = before
        if whole_words:
            tokenizer.model.ignore_merges = True


def _parts(
    name: str, settings: ConfigFields
) -> tuple["Normalizer | None", "PreTokenizer"]:
    """Returns the normalizer and pre-tokenizer of a class."""
    from tokenizers import normalizers
    from tokenizers.pre_tokenizers import Metaspace, Split

    space = settings.get("add_prefix_space", None)
    if name in CLASSES:
        return class_parts(name, bool(space))
    if name == "GemmaTokenizer":
        return normalizers.Replace(" ", SPACE), Split(" ", "merged_with_previous")
    scheme = "first" if space is not False else "never"
    if name == LLAMA and scheme == "first" and settings.get("legacy", False):
        scheme = "always"
    return None, Metaspace(SPACE, scheme, False)


def _is_byte_level(tokenizer: "Tokenizer") -> bool:
    parts = tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor
    states = (part.__getstate__() for part in parts if part is not None)
    return any(b'"ByteLevel"' in state for state in states)
