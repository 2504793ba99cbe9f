"""Reads the tokenizer of a tekken.json, the format of Mistral's newer models.

Its tokens are byte strings ordered by rank, as in tiktoken's files. Two tokens merge if
together they form a token; the merge to the lowest rank comes first.

Source: `MistralConverter` in transformers' integrations/mistral/tokenizer.py (5.23).
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.special_tokens import (
    SpecialTokens,
    add_special_tokens,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tekken.json"
MAX_TOKEN_BYTES = 1024  # the largest published one has 128


def read_tekken(file: Path, special: SpecialTokens) -> "Tokenizer | None":
    """Reads the tokenizer of a tekken.json. Returns None if it lists no special tokens.

    Args:
      file: the tekken.json.
      special: special tokens from other files, which are added to the tokenizer.

    Raises:
      CheckpointError: the file is malformed.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    fields = ConfigFields.read(file)
    config = fields.object("config")
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise config.wants("pattern", "a string", pattern)
    # The special tokens of the oldest files are only in Mistral's library.
    if fields.get("special_tokens", None) is None:
        return None
    names = _special_names(fields)
    count = config.size("default_num_special_tokens", len(names), low=len(names))
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    tokens = _tokens(fields)
    if config.get("default_vocab_size", None) is not None:
        tokens = tokens[: config.size("default_vocab_size", low=count) - count]
    ranks = {token: rank for rank, token in reversed(list(enumerate(tokens)))}
    vocabulary = {_spelled(token): rank + count for token, rank in ranks.items()}
    vocabulary |= {name: i for i, name in enumerate(names)}
    merges = [(_spelled(left), _spelled(right)) for left, right in _merges(ranks)]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
        words = Split(Regex(pattern), "isolated")
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
    tokenizer = Tokenizer(model)
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    add_special_tokens(tokenizer, special)
    return tokenizer


def _special_names(fields: ConfigFields) -> list[str]:
    """Returns the texts of the special tokens, whose ranks must have no gaps."""
    entries = _objects(fields, "special_tokens")
    names = {str(entry.get("rank")): entry.get("token_str") for entry in entries}
    texts = [names.get(str(rank)) for rank in range(len(entries))]
    found = [t for t in texts if isinstance(t, str) and t.isprintable()]
    if len(found) != len(entries):
        raise fields.error("special_tokens", "want a string for each rank from 0 on")
    return found


def _tokens(fields: ConfigFields) -> list[bytes]:
    """Returns the tokens by rank."""
    found = []
    for i, entry in enumerate(_objects(fields, "vocab")):
        value = entry.get("token_bytes")
        if not isinstance(value, str):
            raise fields.wants(f"vocab.{i}.token_bytes", "base64", value)
        try:
            token = base64.b64decode(value, validate=True)
        except ValueError as error:
            raise fields.wants(f"vocab.{i}.token_bytes", "base64", value) from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise fields.error(f"vocab.{i}.token_bytes", f"{len(token)} bytes")
        found.append(token)
    return found


def _objects(fields: ConfigFields, name: str) -> list[dict[str, Any]]:
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise fields.wants(name, "a list of objects", value)
    return value


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields all pairs of tokens that form a token, in the order of its rank."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _spelled(token: bytes) -> str:
    """Converts bytes to the letters that stand for them in byte-level BPE."""
    return "".join(map(LETTERS.__getitem__, token))


def _letters() -> list[str]:
    """Returns the letter of each byte: its own if printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


LETTERS = _letters()
