"""Decodes and encodes text that continues other text.

A tokenizer treats the start of a text specially. SentencePiece tokenizers strip the
space of the first token when they decode, and put a space before the text when they
encode; WordPiece separates every token but the first. Generated tokens and later
prompts stand in the middle of a sequence, so they must not be treated as a start.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # decoders give this character for an incomplete one

# Tokens of the prompt that are decoded again with every piece of the text. Decoders
# need the previous token (CTC) or the bytes of a character (4 byte tokens); the rest
# allows for replacements that span tokens.
_MIN_CONTEXT = 8
_MAX_CHAR_TOKENS = 4


class Decoder(Protocol):
    """A tokenizer, or a `Continuation` of one."""

    def decode(self, ids: list[int], /) -> str:
        """Returns the text of token ids, without special tokens."""


@dataclass(frozen=True)
class Continuation:
    """A decoder of the tokens that follow a prompt.

    Attributes:
      tokenizer: decodes `context` and the new tokens together.
      context: the last tokens of the prompt, as many as the new text can depend on.
      before: the text of `context` alone.
    """

    tokenizer: "Tokenizer"
    context: tuple[int, ...]
    before: str

    def decode(self, ids: Sequence[int], /) -> str:
        """Returns what the new tokens add to the text of the prompt.

        An incomplete character at the end of the prompt that the new tokens complete
        belongs to their text.
        """
        whole = self.tokenizer.decode([*self.context, *ids])
        if whole.startswith(self.before):
            return whole[len(self.before) :]
        kept = len(commonprefix([self.before, whole]))
        changed, new = self.before[kept:], whole[kept:]
        if UNFINISHED in changed:
            return new
        # A malformed run of byte tokens decodes to one mark for each byte, including
        # the bytes of the prompt's characters, which are not part of the new text.
        marks = len(new) - len(new.lstrip(UNFINISHED))
        return new[min(marks, len(changed.encode())) :]

    def after(self, ids: Sequence[int]) -> "Continuation":
        """Returns the continuation of the prompt followed by these tokens."""
        return continuation(self.tokenizer, [*self.context, *ids])


def continuation(tokenizer: "Tokenizer", prompt: Sequence[int]) -> Continuation:
    """Returns a decoder of the tokens that follow `prompt`.

    Its text is `tokenizer.decode(prompt + ids)` without `tokenizer.decode(prompt)`, but
    the whole prompt is decoded only here.
    """
    tokens = list(prompt)
    whole = tokenizer.decode(tokens)
    for size in _context_sizes(len(tokens)):
        context = tokens[-size:]
        before = tokenizer.decode(context)
        # The context must start at a character and contain a character other than a
        # space, so that the special treatment of a start ends before the new text.
        text = before.replace(UNFINISHED, "").strip()
        if text and whole.endswith(before):
            return Continuation(tokenizer, tuple(context), before)
    return Continuation(tokenizer, tuple(tokens), whole)


def _context_sizes(length: int) -> Iterator[int]:
    """Yields context sizes to try. Among a few successive sizes, one starts with a
    whole character."""
    size = _MIN_CONTEXT
    while size < length:
        yield from range(size, min(size + _MAX_CHAR_TOKENS, length))
        size *= 2


def encode_continuation(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Returns the tokens of a text that continues another one.

    Neither special tokens are added nor the space that the tokenizer puts before a
    separate text: "world" after "Hello" reads "Helloworld".
    """
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer
    states = [json.loads(part.__getstate__()) for part in parts if part is not None]
    if any(_without_start(state) != state for state in states):
        tokenizer = _inside_text(tokenizer)
    return tokenizer.encode(text, add_special_tokens=False).ids


@lru_cache(maxsize=8)  # a copy of a large vocabulary takes a second
def _inside_text(tokenizer: "Tokenizer") -> "Tokenizer":
    """Returns a copy that does not treat the start of a text specially."""
    from tokenizers import Tokenizer

    fields = json.loads(tokenizer.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        fields[name] = _without_start(fields[name])
    copy = Tokenizer.from_str(json.dumps(fields))
    copy.encode_special_tokens = tokenizer.encode_special_tokens  # not in the JSON
    return copy


def _without_start(part: Any) -> Any:
    """Returns a normalizer or pre-tokenizer (as JSON) without its treatment of the
    start of a text, or None if it does nothing else."""
    match part:
        case {"type": "Sequence"}:
            steps = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [left for p in part[steps] if (left := _without_start(p))]
            return part | {steps: kept}
        case {"type": "Prepend"}:
            return None
        case {"type": "Strip"}:
            return part | {"strip_left": False}
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": _}:
            return part | {"add_prefix_space": False}
        case _:
            return part
