"""Reads the JSON values of files with records, see `stree_jax.training.records`."""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from stree_jax.training.records import record_of

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Names under which a JSON object may contain the list of records.
LISTS = ("data", "train", "instances", "records", "examples")
MAX_LINE = 2**28  # bytes


def read_records(
    path: Path | str, stream: IO[bytes] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields (place, JSON value) for each record of a file.

    Files whose name ends in .json contain one value: a list of records, one record, or
    an object with a list of records in a field of `LISTS`. These and all other files
    may also contain one value per line; blank lines are skipped. Files whose name ends
    in .gz are unpacked.

    Args:
      path: the file, or a name for messages if `stream` is given.
      stream: an open binary file to read instead. It is also unpacked if the name ends
        in .gz.

    Raises:
      ValueError: the file is not JSON, not UTF-8, or cannot be unpacked; the message
        names the line.
    """
    name = str(path).lower()
    packed = name.endswith(".gz")
    name = name.removesuffix(".gz")
    source = stream or open(path, "rb")
    try:
        opened: Any = gzip.open(source) if packed else source
        with opened:
            yield from (_whole if name.endswith(".json") else _lines)(opened, str(path))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: cannot be unpacked: {error}") from error
    finally:
        source.close()


def decoded(data: bytes) -> str | None:
    """Returns bytes decoded as UTF-8, or as UTF-16 or UTF-32 if they begin with a byte
    order mark; None if they are not valid."""
    encoding = json.detect_encoding(data) if data[:2] in _MARKS else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return None


_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00")


def _lines(stream: IO[bytes], path: str) -> Iterator[tuple[str, Any]]:
    """Yields (place, JSON value) for each line of a JSON Lines file."""
    first = _line(stream, path)
    if first[:2] in _MARKS:  # UTF-16 has zero bytes around its line ends
        text = _text(first + stream.read(), path)
        numbered: Iterator[tuple[int, str]] = enumerate(text.split("\n"), 1)
    else:
        chained = chain([first], iter(lambda: _line(stream, path), b""))
        numbered = (
            (number, _text(line, f"{path}:{number}"))
            for number, line in enumerate(chained, 1)
        )
    for number, line in numbered:
        if line.strip():
            yield f"{path}:{number}", _json(line, f"{path}:{number}")


def _line(stream: IO[bytes], path: str) -> bytes:
    """Returns the next line; b"" at the end.

    Raises:
      ValueError: the line is longer than `MAX_LINE`.
    """
    line = stream.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise ValueError(
            f"{path}: a line of more than {MAX_LINE >> 20} MiB; want one JSON value "
            "per line"
        )
    return line


def _whole(stream: IO[bytes], path: str) -> Iterator[tuple[str, Any]]:
    """Yields (place, JSON value) for each record of a .json file, which may also be a
    JSON Lines file."""
    text = _text(stream.read(), path)
    head, _, rest = text.strip().partition("\n")
    if rest and head.rstrip().endswith(("}", '"')) and _is_json(head):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{path}:{number}", _json(line, f"{path}:{number}")
        return
    if not text.strip():
        return
    value = _json(text, path)
    if isinstance(value, dict) and not _is_record(value):
        lists = [v for name in LISTS if isinstance(v := value.get(name), list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        yield path, value
        return
    for number, record in enumerate(value, 1):
        yield f"{path}: record {number}", record


def _is_record(value: dict[str, Any]) -> bool:
    """True if `record_of` knows the form of a value."""
    try:
        record_of(value, "")
    except ValueError:
        return False
    return True


def _text(data: bytes, where: str) -> str:
    """Returns bytes as text; raises ValueError if they are not valid."""
    text = decoded(data)
    if text is None:
        raise ValueError(f"{where}: not UTF-8; convert it (iconv -t utf-8)")
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(text: str, where: str) -> Any:
    """Parses JSON. Unlike Python's parser, raises ValueError for an object that has a
    key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _TwiceError(f"{where}: the key {twice!r} occurs twice")
        return fields

    try:
        return json.loads(text, object_pairs_hook=once)
    except _TwiceError:
        raise
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        want = "want one JSON value per line (for a list of records, use .json)"
        raise ValueError(f"{where}: not JSON: {reason}; {want}") from error


class _TwiceError(ValueError):
    """Raised for a JSON object that has the same key twice."""
