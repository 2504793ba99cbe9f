"""Encodes and decodes texts with only those tokens of a GGUF vocabulary that they need.

Building a tokenizer of 262,144 tokens takes two seconds, longer than all else before
the first token. But BPE joins parts of a text only into parts of that text. So a
tokenizer of the tokens and merges that occur in a text, which takes milliseconds,
encodes it as the whole tokenizer does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stree_jax.convert.tensors.gguf_header import Header
from stree_jax.convert.tokenizers.gguf_end_tokens import CONTROL
from stree_jax.convert.tokenizers.gguf_vocabulary import (
    SPACE,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    Vocabulary,
    listed_merges,
    numbers_of,
    special_id,
    tokens_of,
    vocabulary_of,
)
from stree_jax.convert.tokenizers.pretokenizers import COMPOSED, pretokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The whole tokenizer is built when encoding in parts has taken about as much time. That
# is counted in letters of the haystack, for which all short parts are stored.
MOST, EACH_TEXT, EACH_LETTER = 2**17, 2**13, 8
SHORT = 24  # characters; few tokens are longer
# Bytes without a token of their own are encoded as these, which may have any type.
BYTE_TEXTS = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True)
class Encoded:
    """The result of `TokenizerInParts.encode`: the ids of a text."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class TokenizerInParts:
    """A tokenizer that encodes and decodes short texts before it is built.

    All other methods and attributes are those of the whole tokenizer, which is built
    when one of them is first used, or when encoding in parts would take longer.
    """

    truncation = padding = None
    encodes_whole_texts = True  # see `for_whole_texts`

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._left = vocabulary, MOST
        self._last: tuple[str, Tokenizer, np.ndarray] | None = None

    @cached_property
    def _whole(self) -> "Tokenizer":
        return self._vocabulary.tokenizer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol of Python, such as that of copies
            raise AttributeError(name)
        return getattr(self._whole, name)

    def encode(
        self, text: str, *pair: Any, add_special_tokens: bool = True, **options: Any
    ) -> Any:
        """Encodes a text as `tokenizers.Tokenizer.encode` does."""
        found = None
        if "_whole" not in vars(self) and not pair and not options:
            found = haystack(self._vocabulary, text) if len(text) <= MOST else None
            self._left -= EACH_TEXT + EACH_LETTER * len(found or "")
        if found is None or self._left < 0:
            options["add_special_tokens"] = add_special_tokens
            return self._whole.encode(text, *pair, **options)
        part, ids = self._part(found)
        encoded = part.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(ids[encoded.ids].tolist())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes token ids as `tokenizers.Tokenizer.decode` does."""
        tokens, kinds = tokens_of(self._vocabulary.fields), self._vocabulary.kinds
        if "_whole" in vars(self) or not all(0 <= i < len(tokens) for i in ids):
            return self._whole.decode(ids, skip_special_tokens)
        left_out = (UNUSED, CONTROL) if skip_special_tokens else (UNUSED,)
        shown = [tokens[i] for i in ids if kinds[i] not in left_out]
        text: str = self._part(None)[0].decoder.decode(shown)
        return text

    def _part(self, found: str | None) -> tuple[Any, np.ndarray]:
        """Returns a tokenizer of the tokens in a text, and their ids.

        Args:
          found: the text. If None, any: decoders do not depend on the tokens.
        """
        last = self._last
        if last is None or found not in (None, last[0]):
            part, ids = part_within(self._vocabulary, found or "")
            self._last = last = found or "", part.tokenizer(), ids
        return last[1:]


def read_in_parts(
    header: Header, warn: Callable[[str], object] | None = None
) -> "Tokenizer | None":
    """Returns the same tokenizer as `read_vocabulary`, in parts if it can be.

    Args, Raises: as `read_vocabulary`. What is malformed in a vocabulary may be found
      only when a text needs it.
    """
    found = vocabulary_of(header, warn)
    if not isinstance(found, Vocabulary):
        return found
    tokens = tokens_of(found.fields)
    if len(set(tokens)) == len(tokens) > len(SPECIAL):  # each id has its own text
        return cast("Tokenizer", TokenizerInParts(found))
    return found.tokenizer()


def haystack(vocabulary: Vocabulary, text: str) -> str | None:
    """Returns a text that contains every token which may occur in `text`, besides the
    special ones and those of single bytes. None if it cannot be known beforehand."""
    if vocabulary.has_pieces:
        return f"{text}\0{text.replace(' ', SPACE)}"
    from tokenizers import normalizers

    if vocabulary.fields.get("pre", "default") in COMPOSED:
        # Parts of a composed text are composed, too.
        if normalizers.NFC().normalize_str(text) != text:
            return None
    letters = pretokenizer(()).pre_tokenize_str(text)
    return text + "\0" + "".join(part for part, _ in letters)


def part_within(vocabulary: Vocabulary, text: str) -> tuple[Vocabulary, np.ndarray]:
    """Returns the part of a vocabulary that occurs in a text. A SentencePiece space may
    stand before any part of the text, because it is put before what follows a special
    token.

    Returns:
      The vocabulary of the special tokens, those of single bytes, and those in `text`,
      with the merges that form them; and the ids [k] int64 of its tokens.
    """
    fields, tokens = vocabulary.fields, tokens_of(vocabulary.fields)
    short = {text[i : i + n] for n in range(SHORT + 1) for i in range(len(text))}

    def occurs(token: str) -> bool:
        rest = token.removeprefix(SPACE)
        found = rest in short if len(rest) <= SHORT else rest in text
        return found or token in BYTE_TEXTS

    always = vocabulary.kinds == UNKNOWN
    named = {name: special_id(fields, name) for name in SPECIAL.values()}
    always[[number for number in named.values() if number is not None]] = True
    pairs = enumerate(zip(tokens, always.tolist(), strict=True))
    ids = np.array([i for i, (token, needed) in pairs if needed or occurs(token)])
    values = dict(fields.values) | {"tokens": [tokens[i] for i in ids]}
    for name, number in named.items():
        if number is not None:
            values[f"{name}_token_id"] = int(np.searchsorted(ids, number))
    if vocabulary.lists_merges:
        merges = listed_merges(fields)
        values["merges"] = [
            m for m in merges if occurs(m[:1] + m[1:].replace(" ", "", 1))
        ]
    else:
        values["scores"] = numbers_of(fields, "scores", len(tokens), "f")[ids]
    return Vocabulary(replace(fields, values=values), vocabulary.kinds[ids]), ids
