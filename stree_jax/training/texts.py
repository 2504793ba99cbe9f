"""Reads the texts in files and folders, and counts what was read and skipped."""

import gzip
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from stree_jax.training.record_files import RECORD_SUFFIXES, decoded, read_records
from stree_jax.training.records import TURNS, Record, Spell, record_of

_TEXTS = (".py", ".txt", ".md")
_ARCHIVES = (".zip", ".whl")
_READ = (*_TEXTS, *RECORD_SUFFIXES)
SUFFIXES = (*_READ, *(f"{suffix}.gz" for suffix in _READ), *_ARCHIVES)
_READ_IN_PARTS = (*_ARCHIVES, ".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
ADVICE = {  # for files of unknown kinds, by suffix; the first is the default
    "to read it as text, name it .txt": (),
    "write its rows as JSON Lines first": (".parquet", ".arrow", ".csv", ".tsv"),
    "unpack it first": (".zst", ".xz", ".bz2", ".tar", ".tgz", ".gz", ".7z", ".rar"),
}
PREPARED = "train.npy"  # a file by which a folder of prepared tokens is recognised

# GSM8K's notes of computations in answers, as in "48/2 = <<48/2=24>>24 clips".
_CALCULATOR = re.compile(r"<<[\d\s.,+\-*/()%$=]*=[\d\s.,+\-*/()%$]*>>")
_MAX_NAMES = 3  # skipped files per reason, or fields, that a message lists


class Spelled(str):
    """A text formatted by a chat template. Names of special tokens in it are encoded as
    special tokens."""

    __slots__ = ()


@dataclass
class Tally:
    """Counts of texts that were read or skipped.

    Attributes:
      files, read_bytes: number of files that were read, and their size on disk.
      texts: number of text files.
      records: number of records of each kind, see `Record.kind`.
      blank: number of texts and records that contain only white space.
      unread: number of records with a field that was not read, by the field's name.
      left_out: number of messages that the chat template leaves out, by role.
      roleless: number of conversations without roles in the text, because there is no
        chat template.
      special: number of plain texts that contain the name of a special token, by token.
        It is encoded as ordinary text.
      latin: names of files that are not UTF-8 and were read as Latin-1.
      skipped: names of skipped files, by reason.
    """

    files: int = 0
    read_bytes: int = 0
    texts: int = 0
    blank: int = 0
    roleless: int = 0
    records: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    special: Counter[str] = field(default_factory=Counter)
    latin: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        """Notes that a file was skipped."""
        self.skipped.setdefault(reason, []).append(name)

    def lines(self) -> list[str]:
        """Returns a report of the counts, as lines."""
        kinds = [f"{count} of {kind}" for kind, count in self.records.most_common()]
        found = [f"{self.texts} texts"] * bool(self.texts or not kinds)
        if kinds:
            total = self.records.total()
            found.append(f"{total} records ({'; '.join(kinds)})")
        size = f"{self.files} files ({self.read_bytes:,} bytes)"
        lines = [f"read {size}: {' and '.join(found)}"]
        if self.unread:
            lines.append(f"fields not read: {_counted(self.unread)}")
        if self.roleless:
            count = f"{self.roleless} conversations"
            lines.append(f"{count} are joined without their roles: no chat template")
        if self.left_out:
            out = _counted(self.left_out)
            lines.append(f"the chat template leaves out messages, by role: {out}")
        if self.special:
            named = _counted(self.special)
            lines.append(f"special tokens in plain text are read as text: {named}")
        if self.blank:
            lines.append(f"{self.blank} blank texts or records are left out")
        if self.latin:
            lines.append(f"not UTF-8, read as Latin-1: {_first_names(self.latin)}")
        for reason, names in self.skipped.items():
            lines.append(f"skipped, {reason}: {_first_names(names)}")
        return lines


def read_texts(
    paths: Sequence[Path], tally: Tally, spell: Spell | None = None
) -> Iterator[str]:
    """Yields the texts in files and, recursively and in sorted order, in folders.

    Args:
      paths: the files and folders.
      tally: counts the texts that are read and skipped.
      spell: formats conversations as text. If None, their messages are joined by
        newlines.

    Raises:
      ValueError: at once, if a path is missing or of an unknown kind; during iteration,
        if a file is damaged or contains a record of an unknown form.
    """
    files: list[tuple[Path, bool]] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if path.is_dir():
            if (path / PREPARED).is_file():
                raise ValueError(
                    f"{path}: a folder of prepared tokens; it must be the only path"
                )
            files += [(file, True) for file in _files_below(path, tally)]
            continue
        if not path.is_file():
            raise ValueError(
                f"{path}: not a regular file (texts are read twice, so pipes do not "
                "work)"
            )
        if not path.name.lower().endswith(SUFFIXES):
            shown = " ".join((*_READ, *_ARCHIVES))
            raise ValueError(f"{path}: not one of {shown} or .gz; {_advice(path)}")
        files.append((path, False))
    reader = _Reader(tally, spell)
    return (text for path, found in files for text in reader.read(path, found))


def _advice(path: Path) -> str:
    """Returns what to do with a file of an unknown kind."""
    name = path.name.lower()
    found = (advice for advice, ends in ADVICE.items() if name.endswith(ends))
    return next(found, next(iter(ADVICE)))


def _files_below(folder: Path, tally: Tally) -> list[Path]:
    """Returns the files of known kinds in a folder, in a fixed order."""
    found = {path.relative_to(folder).parts: path for path in folder.rglob("*")}
    files = []
    for parts, path in sorted(found.items()):
        name = str(path)
        if path.is_dir():
            if path.is_symlink():
                tally.skip("links to folders", name)
        elif any(part.startswith(".") for part in parts):
            tally.skip("hidden", name)
        elif not path.is_file():
            tally.skip("not regular files", name)
        elif not path.name.lower().endswith(SUFFIXES):
            tally.skip("of kinds that are not read", name)
        else:
            files.append(path)
    return files


@dataclass(frozen=True)
class _Reader:
    """A reader of files, for `read_texts`."""

    tally: Tally
    spell: Spell | None

    def read(self, path: Path, found: bool) -> Iterator[str]:
        """Yields the texts in one file.

        Args:
          path: the file.
          found: True if the file was found in a folder, False if it was named.
        """
        self.tally.files += 1
        self.tally.read_bytes += (size := path.stat().st_size)
        if not path.name.lower().endswith(_READ_IN_PARTS):
            _check_fits(path, size)
        try:
            if path.name.lower().endswith(_ARCHIVES):
                yield from self._archive(path)
            else:
                with open(path, "rb") as stream:
                    yield from self._stream(stream, str(path), found)
        except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: cannot be unpacked: {error}") from error

    def _archive(self, path: Path) -> Iterator[str]:
        """Yields the texts of an archive's members. Of wheels, only .py and .txt files
        are read."""
        kinds = (".py", ".txt") if path.name.lower().endswith(".whl") else SUFFIXES
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.filename):
                name = info.filename
                place = f"{path}/{name}"
                if info.is_dir():
                    continue
                if _is_test_or_metadata(name):
                    self.tally.skip("tests and metadata of archives", place)
                elif not name.lower().endswith(kinds) or name.endswith(_ARCHIVES):
                    self.tally.skip("of kinds that are not read", place)
                else:
                    if info.flag_bits & 1:
                        raise ValueError(f"{place}: encrypted; unpack it first")
                    with archive.open(info) as stream:
                        yield from self._stream(stream, place, True)

    def _stream(self, stream: IO[bytes], name: str, found: bool) -> Iterator[str]:
        """Yields the texts of an open file that is not an archive."""
        bare = name.lower().removesuffix(".gz")
        if bare.endswith(RECORD_SUFFIXES):
            records = read_records(name, stream)
            if found and bare.endswith(".json"):
                yield from self._records_or_none(records, name)
            else:
                yield from map(self._text_of, records)
            return
        data = stream.read()
        data = gzip.decompress(data) if name.lower().endswith(".gz") else data
        text = decoded(data)
        if text is None:
            self.tally.latin.append(name)
            text = data.decode("latin-1")
        self.tally.texts += 1
        yield self._kept(text.replace("\r\n", "\n"))

    def _records_or_none(
        self, records: Iterator[tuple[str, object]], name: str
    ) -> Iterator[str]:
        """Yields the texts of a .json file that was found in a folder. It is skipped if
        it does not contain records but, for example, settings."""
        place, first = next(records, (name, None))
        if place == name and not isinstance(first, str):  # one value, not a list
            try:
                record_of(first, place)
            except ValueError:
                self.tally.skip("JSON that is no list of records", name)
                return
        yield self._text_of((place, first))
        yield from map(self._text_of, records)

    def _text_of(self, found: tuple[str, object]) -> str:
        """Returns the text of a record, given as (place, value)."""
        place, value = found
        record = record_of(value, place)
        self.tally.records[record.kind] += 1
        unread = record.unread
        # Questions without answers, such as MT-Bench's, are not formatted as a
        # conversation.
        if record.messages and self.spell is not None and record.kind != TURNS:
            return self._kept(Spelled(self._spelled(record, self.spell, place)))
        self.tally.unread.update(unread)
        self.tally.roleless += bool(record.messages) and record.kind != TURNS
        if record.kind == "question + answer":
            cleaned = _CALCULATOR.sub("", record.answer or "")
            record = replace(record, answer=cleaned)
        return self._kept(record.text())

    def _spelled(self, record: Record, spell: Spell, place: str) -> str:
        """Returns a conversation formatted by the chat template, and counts the
        messages that the template leaves out."""
        try:
            text = spell(record.messages)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        for message in record.messages:
            # Templates leave out the reasoning before earlier answers.
            content = message["content"].rpartition("</think>")[2].strip()
            if content not in text and message["role"] != "tool":
                self.tally.left_out[message["role"]] += 1
        fields = [name for name in record.unread if not name.startswith("message ")]
        self.tally.unread.update(fields)
        return text

    def _kept(self, text: str) -> str:
        """Returns a text that UTF-8 can encode, without the lone surrogates that JSON
        allows, and counts it if it is blank."""
        kind = type(text)
        text = text.encode("utf-8", "replace").decode().replace("\r\n", "\n")
        self.tally.blank += not text.strip()
        return kind(text)


def _check_fits(path: Path, size: int) -> None:
    """Raises ValueError if a file that is read at once is larger than the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ValueError(
            f"{path}: {size / 1e9:.0f} GB are read at once, and this machine has "
            f"{memory / 1e9:.0f} GB of memory; split it, or write it as JSON Lines"
        )


def _is_test_or_metadata(name: str) -> bool:
    """True for a member of an archive that is a test or metadata of the archive."""
    *folders, file = name.split("/")
    if file.startswith("test_") or any(
        part.startswith(".") for part in (*folders, file)
    ):
        return True
    outside = ("tests", "test", "__MACOSX")
    return any(f in outside or f.endswith(".dist-info") for f in folders)


def _counted(counts: Mapping[str, int]) -> str:
    """Returns names with their counts, the most frequent first."""
    return _first_names(
        [f"{name} ({count})" for name, count in Counter(counts).most_common()], 8
    )


def _first_names(names: Iterable[str], most: int = _MAX_NAMES) -> str:
    """Returns the first names as a list, and the number of the others."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
