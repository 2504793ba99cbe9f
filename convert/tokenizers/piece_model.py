"""Reads the tokenizer of a SentencePiece model, `tokenizer.model`, without its library.

Only BPE models without text normalization are supported: those of Llama, Mistral and
their descendants. The result is the same as from a GGUF file of the same vocabulary.

Source: sentencepiece's `sentencepiece_model.proto`.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tokenizers.gguf_vocabulary import piece_tokenizer
from stree_jax.convert.tokenizers.special_tokens import (
    SpecialTokens,
    add_special_tokens,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.model"
BPE = 2  # trainer_spec.model_type
MAX_BYTES = 2**26  # size of a file; the largest published ones have 2**23 bytes
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types of protocol buffers
Value = int | bytes


def is_piece_model(file: Path) -> bool:
    """True if the file begins like a SentencePiece model, with a first piece.

    Some files of that name are text, for example those of Llama 3.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(3)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return len(head) == 3 and head[0] == 1 << 3 | BYTES and head[2] == 1 << 3 | BYTES


def read_piece_model(
    file: Path, settings: ConfigFields, special: SpecialTokens
) -> "Tokenizer | None":
    """Reads the tokenizer of a SentencePiece model. Returns None if the model is of an
    unsupported kind.

    Args:
      file: the model.
      settings: fields of tokenizer_config.json.
      special: special tokens from other files, which are added to the tokenizer.

    Raises:
      CheckpointError: the file is damaged.
    """
    with _readable(file):
        values = _vocabulary(file)
    if values is None:
        return None
    for name in ("add_bos_token", "add_eos_token"):
        if settings.get(name, None) is not None:
            values[name] = settings.flag(name, False)
    if settings.get("add_prefix_space", None) is not None:
        values["add_space_prefix"] = settings.flag("add_prefix_space", True)
    tokenizer = piece_tokenizer(ConfigFields(file, values))
    add_special_tokens(tokenizer, special)
    return tokenizer


def is_bpe_model(file: Path) -> bool:
    """True if a SentencePiece model is of the supported kind. Does not read its pieces.

    Raises:
      CheckpointError: the file is damaged.
    """
    with _readable(file):
        return _is_supported(list(_message(file.read_bytes())))


def piece_id(file: Path, text: str) -> int | None:
    """Returns the id of a piece of a SentencePiece model, without building its
    tokenizer. None if the model lacks the piece or is of an unsupported kind.

    Raises:
      CheckpointError: the file is damaged.
    """
    wanted = text.encode("utf-8", "replace")
    with _readable(file):
        parts = list(_message(file.read_bytes()))
        if not _is_supported(parts):
            return None
        pieces = [value for number, value in parts if number == 1]
        for i, piece in enumerate(pieces):
            if isinstance(piece, bytes) and wanted in piece:
                if dict(_message(piece)).get(1) == wanted:
                    return i
    return None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Converts the errors of parsing a SentencePiece model.

    Raises:
      CheckpointError: the file is damaged or too large.
    """
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{file}: larger than {MAX_BYTES} bytes")
    try:
        yield
    except (IndexError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file}: not a SentencePiece model ({error})") from error


def _is_supported(parts: list[tuple[int, Value]]) -> bool:
    """True if a model's settings say BPE without normalization."""
    trainer, normalizer = (_settings(parts, number) for number in (2, 3))
    normalizes = normalizer.get(2) or normalizer.get(4, 1)
    return trainer.get(3, 1) == BPE and not normalizes


def _settings(parts: list[tuple[int, Value]], number: int) -> dict[int, Value]:
    """Returns the last message with this number, or an empty one."""
    found = [value for n, value in parts if n == number and isinstance(value, bytes)]
    return dict(_message(found[-1])) if found else {}


def _vocabulary(file: Path) -> dict[str, Any] | None:
    """Returns the model as the metadata of a GGUF file's vocabulary, or None if it is
    of an unsupported kind.

    Raises:
      ValueError, IndexError, struct.error: the file is not a SentencePiece model.
    """
    parts = list(_message(file.read_bytes()))
    if not _is_supported(parts):
        return None
    trainer, normalizer = (_settings(parts, number) for number in (2, 3))
    pieces = [
        dict(_message(value))
        for number, value in parts
        if number == 1 and isinstance(value, bytes)
    ]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [_text(piece.get(1, b"")) for piece in pieces],
        "scores": np.array([_float(piece.get(2, 0)) for piece in pieces], np.float32),
        "token_type": np.array([piece.get(3, 1) for piece in pieces], np.int32),
        "add_space_prefix": bool(normalizer.get(3, 1)),
    }
    for name, number, default in (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2)):
        value = trainer.get(number, default)
        if isinstance(value, int) and value < len(
            pieces
        ):  # -1 is read as a large number
            values[f"{name}_token_id"] = value
        elif name == "bos":
            values["add_bos_token"] = False
    return values


def _text(value: Value) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a piece is not a text")
    return value.decode("utf-8")


def _float(value: Value) -> float:
    return float(struct.unpack("<f", value)[0]) if isinstance(value, bytes) else 0.0


def _message(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yields the fields of a protocol buffer message, as pairs (number, value).

    Raises:
      ValueError, IndexError: the bytes are not a message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in (EIGHT, FOUR):
            length = 8 if kind == EIGHT else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(data):
            raise ValueError("the last field is incomplete")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a number of up to ten bytes. Returns it and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")
