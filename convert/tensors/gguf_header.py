"""Reads the header of a GGUF file: its metadata, and the positions of its tensors.

This is not the reader of the `gguf` package, because a damaged file must not cost
memory or time: every count and length is checked against the remaining bytes before it
is used. Format: GGUF versions 2 and 3, little-endian (ggml's docs/gguf.md).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import check_fetched
from stree_jax.convert.tensors.gguf_blocks import KINDS, OTHER_KINDS, Kind, without_ones
from stree_jax.convert.tensors.tensor_files import file_names, weights_among

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 2**26  # bytes; the largest vocabularies take 2**24
PIECE = 2**20  # bytes that are read at once
FEW = 1000  # texts of an array that are read one by one where many cannot be
MAX_COUNT = 2**17  # keys, and tensors
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20
ALIGNMENT = "general.alignment"
STRING, ARRAY, BOOL = 8, 9, 7
# NumPy's dtypes of scalar values, by GGUF's number of the type.
SCALARS = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4"))),
    **{BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Stored:
    """A tensor in a GGUF file.

    Attributes:
      file: the file.
      shape: shape with the slowest axis first, as in NumPy; see `without_ones`.
      kind: how its numbers are stored.
      start: offset of its first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    kind: Kind
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
      file: the file, or its first shard.
      values: metadata by key. An array of numbers is a NumPy array, others are lists.
      tensors: the tensors of all shards, by name.
    """

    file: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, Stored]


class _Cursor:
    """Reads a file sequentially, but not past its end or the largest allowed header.

    Attributes:
      end: where reading stops, in bytes from the beginning of the file.
      data: the part of the file that is in memory. It is replaced as reading goes on.
      at: offset of the next byte in `data`.
    """

    def __init__(self, file: Path, opened: BinaryIO, size: int) -> None:
        self.file, self.opened, self.size = file, opened, size
        self.end = min(size, MAX_HEADER)
        self.data, self.at = b"", 0
        self._before = 0  # bytes of the file before `data`

    @property
    def position(self) -> int:
        """Offset of the next byte in the file."""
        return self._before + self.at

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {problem}")

    def take(self, count: int, what: str) -> bytes:
        if self.at + count > len(self.data):
            self.fill(count, what)
        self.at += count
        return self.data[self.at - count : self.at]

    def fill(self, count: int, what: str) -> None:
        """Reads until `data` has `count` bytes from `at` on, and `PIECE` if it can."""
        self.check(count, what)
        rest = self.data[self.at :]
        self._before += self.at
        wanted = min(max(count, PIECE), self.end - self._before) - len(rest)
        self.data, self.at = rest + self.opened.read(wanted), 0
        if len(self.data) < count:
            raise self.error(f"{what}: the file became shorter while it was read")

    def check(self, count: int, what: str) -> None:
        """Raises CheckpointError if fewer than `count` bytes are left."""
        if count <= self.end - self.position:
            return
        if self.end < self.size:
            raise self.error(f"{what}: the header has more than {MAX_HEADER} bytes")
        raise self.error(f"{what}: the file is truncated")

    def number(self, what: str, dtype: str = "<u8") -> Any:
        kind = np.dtype(dtype)
        read = np.frombuffer(self.take(kind.itemsize, what), kind)[0]
        if kind == np.float32:  # the shortest decimal: 1e-05, not 9.999999747e-06
            return float(str(read))
        return read.item()

    def count(self, what: str) -> int:
        """Reads the number of items that follow; `what` names them in messages."""
        count: int = self.number(what)
        if count > MAX_COUNT:
            raise self.error(f"{what}: {count}, want at most {MAX_COUNT}")
        return count

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """Reads texts with their lengths in front."""
        self.check(8 * count, what)
        found: list[bytes] = []
        by_one, wait = int(count == 1), FEW  # texts until `_short_texts` is tried again
        while len(found) < count:
            if by_one == 0:
                short = self._short_texts(count - len(found))
                found += short
                # A try splits all of `data`, so bad ones must be rare.
                by_one, wait = (1, FEW) if len(short) > FEW else (wait, 2 * wait)
            else:
                length = self.number(what)
                found.append(self.take(length, what))
                by_one -= 1
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            raise self.error(f"{what}: not UTF-8 ({error.reason})") from error

    def _short_texts(self, most: int) -> list[bytes]:
        """Reads texts of fewer than 256 bytes that are in `data`, all but the last one.

        A vocabulary has 262,144 of them, and a loop over their lengths takes 0.2 s. The
        upper seven bytes of each length are 0, so the data is split there. Each part
        then is a text and the lowest byte of the next length.
        """
        parts = self.data[self.at :].split(bytes(7), most + 1)[:-1]
        lengths = [1, *(part[-1] + 1 if part else 0 for part in parts)]
        if list(map(len, parts)) != lengths[:-1]:  # a text has zeros, or 256 bytes
            pairs = enumerate(zip(parts, lengths, strict=False))
            wrong = next(i for i, (part, length) in pairs if len(part) != length)
            parts = parts[:wrong]
        found = [part[:-1] for part in parts[1:]]
        self.at += sum(map(len, found)) + 8 * len(found)
        return found

    def value(self, key: str) -> Any:
        """Reads a value with its type in front."""
        kind = self.number(key, "<u4")
        if kind == STRING:
            return self.text(key)
        if kind != ARRAY:
            return self.number(key, self._scalar(kind, key))
        kind, count = self.number(key, "<u4"), self.number(key)
        if kind == STRING:
            return self.texts(count, key)
        if kind == ARRAY:
            raise self.error(f"{key}: arrays of arrays are not supported")
        dtype = np.dtype(self._scalar(kind, key))
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise self.error(f"{key}: unknown type of value {kind}")
        return SCALARS[kind]


def is_gguf(path: Path) -> bool:
    """True if the path has the name of a GGUF file. Its content is not checked."""
    return path.suffix == ".gguf" and not path.is_dir()


def only_gguf(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory that has no other weights, or None.

    Raises:
      CheckpointError: there are several GGUF files.
    """
    names = file_names(directory)
    has_params = (directory / "params").is_dir()  # of our own format
    if "config.json" in names and (has_params or weights_among(names)):
        return None
    whole = first_shards(name for name in names if name.endswith(".gguf"))
    if len(whole) > 1:
        shown = ", ".join(whole[:8])
        raise CheckpointError(f"{directory}: several GGUF files, name one: {shown}")
    return directory / whole[0] if whole else None


def first_shards(names: Iterable[str]) -> list[str]:
    """Returns the sorted names of GGUF files, without shards other than first ones."""
    shards = {name: SHARD.fullmatch(name) for name in sorted(names)}
    return [name for name, s in shards.items() if s is None or int(s[2]) == 1]


def read_header(file: Path) -> Header:
    """Reads the header of a file. If it is the first of several shards, also reads the
    headers of the others.

    Raises:
      CheckpointError: a file is invalid. The message is one line with the file.
    """
    shard = SHARD.fullmatch(file.name)
    if shard is None or int(shard[3]) == 1:
        return read_one(file)
    if int(shard[2]) != 1:
        first = f"{shard[1]}-00001-of-{shard[3]}.gguf"
        raise CheckpointError(f"{file}: a shard; name the first of them, {first}")
    header = read_one(file)
    tensors = dict(header.tensors)
    for number in range(2, int(shard[3]) + 1):
        path = file.with_name(f"{shard[1]}-{number:05}-of-{shard[3]}.gguf")
        if not path.is_file():
            raise CheckpointError(f"{path}: this shard is missing")
        found = read_one(path).tensors
        if repeated := tensors.keys() & found.keys():
            raise CheckpointError(f"{path}: {min(repeated)} is also in another shard")
        tensors |= found
    return Header(file, header.values, tensors)


def read_one(file: Path) -> Header:
    try:
        if not file.is_file():
            raise CheckpointError(f"{file}: not a regular file")
        with file.open("rb") as opened:
            return _parse(_Cursor(file, opened, file.stat().st_size))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


def _parse(cursor: _Cursor) -> Header:
    if cursor.take(4, "GGUF") != MAGIC:
        check_fetched(cursor.file)
        raise cursor.error("not a GGUF file")
    version = cursor.number("version", "<u4")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        said = "big-endian" if swapped else f"of version {version}"
        raise cursor.error(f"a GGUF file {said} is not supported (want version 2 or 3)")
    tensors, pairs = cursor.count("number of tensors"), cursor.count("number of keys")
    values: dict[str, Any] = {}
    for i in range(pairs):
        key = cursor.text(f"key {i}")
        if key in values:
            raise cursor.error(f"{key!r}: occurs twice")
        values[key] = cursor.value(key)
    return Header(
        cursor.file, values, _tensors(cursor, tensors, _alignment(cursor, values))
    )


def _alignment(cursor: _Cursor, values: Mapping[str, Any]) -> int:
    size = values.get(ALIGNMENT, 32)
    if type(size) is not int or not 0 < size <= MAX_ALIGNMENT or size & (size - 1):
        raise cursor.error(f"{ALIGNMENT}: want a power of two, got {size!r:.40}")
    return size


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Stored]:
    """Reads the positions of all tensors, and checks that they are inside the file and
    do not overlap."""
    read: list[tuple[int, str, tuple[int, ...], Kind]] = []
    names = set()
    for i in range(count):
        name = cursor.text(f"name of tensor {i}")
        if name in names:
            raise cursor.error(f"tensor {name!r} occurs twice")
        names.add(name)
        shape, kind = _shape(cursor, name)
        read.append((cursor.number(name), name, shape, kind))
    begin = -(-cursor.position // alignment) * alignment
    found, free, last = {}, begin, ""
    for offset, name, shape, kind in sorted(read):
        start = begin + offset
        if offset % alignment:
            raise cursor.error(
                f"{name}: begins at {offset}, not at a multiple of {alignment}"
            )
        if start < free:
            raise cursor.error(f"{name}: begins within {last}")
        free, last = start + kind.nbytes(math.prod(shape)), name
        if free > cursor.size:
            raise cursor.error(f"{name}: the file is truncated")
        found[name] = Stored(cursor.file, without_ones(shape), kind, start)
    return {name: found[name] for _, name, _, _ in read}


def _unsupported(number: int) -> str:
    """Returns the message for a storage type that cannot be read."""
    known = OTHER_KINDS.get(number)
    if known is None:
        last = max(KINDS)
        return (
            f"unknown type of tensor {number} (ggml's types known here end at {last})"
        )
    return (
        f"type {known} is not supported for weights; get or make a file of another "
        "type, such as Q4_K_M or Q8_0"
    )


def _shape(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], Kind]:
    """Reads a tensor's shape, slowest axis first, and its storage type."""
    dims = cursor.number(name, "<u4")
    if not 0 < dims <= MAX_DIMS:
        raise cursor.error(f"{name}: {dims} axes, want 1 to {MAX_DIMS}")
    shape = tuple(cursor.number(name) for _ in range(dims))[::-1]
    number = cursor.number(name, "<u4")
    if number not in KINDS:
        raise cursor.error(f"{name}: {_unsupported(number)}")
    kind = KINDS[number]
    if 0 in shape or shape[-1] % kind.block:
        raise cursor.error(
            f"{name}: shape {list(shape)} is not a multiple of {kind.block} numbers "
            f"per block ({kind.name})"
        )
    return shape, kind
