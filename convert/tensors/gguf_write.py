"""Writes the container of a GGUF file: the inverse of `gguf_header`.

The `gguf` package is not used: its writer keeps all tensors in memory or in a second
file, and quantizes to none of the K types.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from stree_jax.convert.tensors.gguf_blocks import Kind
from stree_jax.convert.tensors.gguf_header import (
    ARRAY,
    BOOL,
    MAGIC,
    SCALARS,
    STRING,
    VERSIONS,
)

ALIGNED = 32  # bytes; the default of `gguf_header.ALIGNMENT`
UINT32, FLOAT32, INT64 = 4, 6, 11  # GGUF's numbers of types of values
NUMBERS = {np.dtype(dtype): number for number, dtype in SCALARS.items()}


class Entry(NamedTuple):
    """A tensor that is to be written.

    Attributes:
      name: its name.
      shape: its shape, with the slowest axis first.
      kind: its storage type.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def nbytes(self) -> int:
        return self.kind.nbytes(math.prod(self.shape))


def write_container(
    file: BinaryIO,
    values: Mapping[str, Any],
    entries: Sequence[Entry],
    data: Iterable[np.ndarray],
) -> None:
    """Writes a whole GGUF file.

    Args:
      file: the file, opened for writing.
      values: metadata by key. An int is written as uint32 or int64, a float as float32,
        an array of numbers in its dtype.
      entries: the tensors.
      data: the bytes of each tensor, uint8, in the same order. Only one is in memory at
        a time if this is a generator.
    """
    head = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(entries), len(values))]
    for key, value in values.items():
        head += [_text(key), *_value(value)]
    offset = 0
    for entry in entries:
        dims = struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
        head += [_text(entry.name), struct.pack("<I", len(entry.shape)), dims]
        head.append(struct.pack("<IQ", entry.kind.number, offset))
        offset += entry.nbytes + -entry.nbytes % ALIGNED
    whole = b"".join(head)
    file.write(whole + bytes(-len(whole) % ALIGNED))
    for entry, part in zip(entries, data, strict=True):
        assert part.nbytes == entry.nbytes, entry.name
        file.write(part.data)
        file.write(bytes(-part.nbytes % ALIGNED))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> Iterable[bytes]:
    """Yields a value with its type in front."""
    match value:
        case bool():
            yield struct.pack("<I?", BOOL, value)
        case int() if 0 <= value < 2**32:
            yield struct.pack("<II", UINT32, value)
        case int():
            yield struct.pack("<Iq", INT64, value)
        case float():
            yield struct.pack("<If", FLOAT32, value)
        case str():
            yield struct.pack("<I", STRING) + _text(value)
        case np.ndarray():
            kind = NUMBERS[value.dtype.newbyteorder("<")]
            yield struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
        case _:
            yield struct.pack("<IIQ", ARRAY, STRING, len(value))
            yield from map(_text, value)
