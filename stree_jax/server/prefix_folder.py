"""`serve --prefix-folder`: copies of the cached prefixes on disk, which outlive the
server.

The folder has a file for each node of the prefix tree, named by a digest of the text up
to its end. A thread writes and removes files in the background, each atomically, so
that a killed process leaves a complete folder. The next server maps the files; a file's
checksum is compared when a prompt first needs it.

Everything is below one subfolder. A subfolder that was not written for the same model
by the same version, or that is damaged, is renamed, and a new one is begun.
"""

import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stree_jax import cpu_kernels
from stree_jax.common.cache_folder import only_the_user_writes
from stree_jax.common.digests import digest_of
from stree_jax.common.version import __version__
from stree_jax.common.whole_file import PRIVATE, write_whole
from stree_jax.server.host_states import Arrays, Form
from stree_jax.server.prefixes import Node, Prefixes

FORMAT = 1  # raise it if the files change
FOLDER, ABOUT = "prefixes", "about.json"
MAGIC = b"streepfx"
ALIGNED = 64  # bytes; arrays begin at multiples of it
MOST_HEADER = 1 << 16  # bytes
FLUSH_S = 30.0  # seconds that `close` waits for files to be written
NAME = re.compile(r"[0-9a-f]{32}\.prefix")
LEFT = re.compile(r"\.[0-9a-f]{32}\.prefix.+")  # of a killed process
SET_ASIDE = ".damaged"


class Damaged(Exception):
    """A file or folder that was not written by this module, or not completely."""


@dataclass(frozen=True, eq=False)
class Entry:
    """The content of a file.

    Attributes:
      parent: name of the file of the node before, or "".
      start, tokens, rows, kept: see `Node`.
    """

    parent: str
    start: int
    tokens: np.ndarray
    rows: Arrays
    kept: Arrays | None

    def arrays(self) -> list[np.ndarray]:
        return [self.tokens, *self.rows, *(self.kept or ())]


def model_key(values: Any, form: Form) -> str:
    """Returns a digest of all that states depend on besides the text.

    Args:
      values: a pytree of the models, such as (target, drafter).
      form: the arrays of the states.
    """
    facts = (FORMAT, __version__, jax.__version__, cpu_kernels.describe())
    return digest_of(values, (facts, form.places))


def written(entry: Entry) -> bytes:
    """Returns the bytes of an entry's file."""
    parts = [_padded(np.ascontiguousarray(x).tobytes()) for x in entry.arrays()]
    body = b"".join(parts)
    header = {
        "parent": entry.parent,
        "start": entry.start,
        "tokens": len(entry.tokens),
        "rows": [x.nbytes for x in entry.rows],
        "kept": entry.kept is not None,
        "crc": zlib.crc32(body),
    }
    text = json.dumps(header).encode()
    return _padded(MAGIC + len(text).to_bytes(8, "little") + text) + body


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNED)


def mapped(file: Path, form: Form) -> tuple[Entry, Callable[[], bool]]:
    """Maps a file into memory.

    Args:
      file: the file.
      form: the arrays that it should have.

    Returns:
      The entry, and a function that reads the whole file and returns whether its
      checksum is right.

    Raises:
      Damaged: it has another size or header.
      OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        begin = stream.read(16)
        size = int.from_bytes(begin[8:], "little")
        if begin[:8] != MAGIC or size > MOST_HEADER:
            raise Damaged(f"{file.name} is not a prefix file")
        text = stream.read(size)
    try:
        header = json.loads(text)
        parent, start, count = (header[k] for k in ("parent", "start", "tokens"))
        sizes, has_kept, crc = header["rows"], header["kept"], header["crc"]
        whole = all(type(x) is int and x >= 0 for x in (start, count, crc, *sizes))
        if not (whole and count and type(parent) is str and type(has_kept) is bool):
            raise ValueError
        shapes = list(_shapes(form, count, sizes, has_kept))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{file.name} has a damaged header") from error
    at = first = -(-(16 + size) // ALIGNED) * ALIGNED
    places = []
    for shape, dtype in shapes:
        places.append((at, shape, dtype))
        at += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED
    if file.stat().st_size != at:
        raise Damaged(f"{file.name} is not complete")
    data = np.memmap(file, np.uint8, "r")
    tokens, *others = (_array(data, *place) for place in places)
    rows, kept = others[: len(sizes)], others[len(sizes) :]
    entry = Entry(parent, start, tokens, tuple(rows), tuple(kept) if has_kept else None)
    return entry, lambda: zlib.crc32(data[first:].data) == crc


def _array(
    data: np.ndarray, at: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    return data[at : at + size].view(dtype).reshape(shape)


def _shapes(
    form: Form, count: int, sizes: list[int], has_kept: bool
) -> Iterator[tuple[tuple[int, ...], np.dtype]]:
    """Yields the shapes and dtypes of an entry's arrays.

    Raises:
      ValueError: the sizes of rows in bytes do not fit the form.
    """
    yield (count,), np.dtype(np.int32)
    for j, (i, size) in enumerate(zip(form.caches, sizes, strict=True)):
        place, axis = form.places[i], form.axis(j)
        row = int(np.prod(place.shape)) // place.shape[axis] * place.dtype.itemsize
        if size % row or size // row > min(count, place.shape[axis]):
            raise ValueError(f"{size} bytes of rows of {row} bytes")
        shape = [*place.shape]
        shape[axis] = size // row
        yield tuple(shape), place.dtype
    for i in form.others if has_kept else ():
        yield form.places[i].shape, form.places[i].dtype


class PrefixFolder:
    """The copies of a cache of prefixes in a folder."""

    def __init__(
        self,
        folder: Path,
        prefixes: Prefixes,
        key: str,
        num_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        """Reads the folder into an empty cache, and begins to follow its changes. If
        the folder cannot be used, says so in one line and does nothing more.

        Args:
          folder: the folder of --prefix-folder; it is made if it does not exist.
          prefixes: the cache, with its form.
          key: result of `model_key`.
          num_tokens: V.
          say: prints a line.
        """
        self.folder, self.prefixes, self.key, self.say = folder, prefixes, key, say
        self.num_tokens = num_tokens
        self.path = folder / FOLDER
        self._pending: dict[
            str, Entry | None
        ] = {}  # If None, the file is to be removed.
        self._wake, self._closing, self._failed = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run, name="prefixes", daemon=True)
        self._lock: int | None = None
        try:
            self._open()
        except OSError as error:
            self._stop(error)
            return
        if not self._failed:
            prefixes.on_change = self.changed
            prefixes.prune()
            prefixes.evict()
            self._thread.start()

    def _stop(self, error: OSError | str) -> None:
        """Says why prefixes are not saved, and stops saving."""
        problem = error if isinstance(error, str) else error.strerror or error
        self.say(f"{self.path}: {problem}; prefixes are not saved")
        self._failed = True

    def _open(self) -> None:
        """Locks the folder, sets it aside if it does not fit, and reads it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._locked():
            self._stop("in use by another server")
            return
        if self.path.is_symlink() or self.path.exists():
            try:
                self._read()
                return
            except (Damaged, ValueError) as error:
                self.prefixes.clear()
                place = self._set_aside()
                self.say(f"{self.path}: {error}; set aside as {place.name}")
        self.path.mkdir(mode=0o700)
        about = {"format": FORMAT, "key": self.key}
        write_whole(self.path / ABOUT, json.dumps(about).encode())

    def _locked(self) -> bool:
        """Locks the folder until the process ends. True if no other process has it."""
        import fcntl

        self._lock = os.open(self.folder / f".{FOLDER}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _set_aside(self) -> Path:
        """Renames the subfolder. Returns its new path."""
        number = 1
        while (place := self.path.with_name(f"{FOLDER}.aside-{number}")).exists():
            number += 1
        os.rename(self.path, place)
        return place

    def _read(self) -> None:
        """Reads the subfolder into the cache.

        Raises:
          Damaged: it is not that of this model, or not as it was written.
        """
        if self.path.is_symlink() or not self.path.is_dir():
            raise Damaged("not a folder")
        if not only_the_user_writes(self.path):
            raise Damaged("others can write to it")
        try:
            about = json.loads((self.path / ABOUT).read_bytes())
        except (OSError, ValueError) as error:
            raise Damaged(f"{ABOUT} is missing or damaged") from error
        if about != {"format": FORMAT, "key": self.key}:
            raise Damaged("written for another model, version or machine")
        files = []
        for file in self.path.iterdir():
            if LEFT.fullmatch(file.name):
                file.unlink()
            elif NAME.fullmatch(file.name):
                files.append((file.stat().st_mtime, file))
            elif file.name != ABOUT and file.suffix != SET_ASIDE:
                raise Damaged(f"{file.name} is not a file of prefixes")
        entries = {
            file.name: (age, *mapped(file, self.prefixes.form))
            for age, (_, file) in enumerate(sorted(files))
        }
        self._insert(entries)

    def _insert(
        self, entries: dict[str, tuple[int, Entry, Callable[[], bool]]]
    ) -> None:
        """Adds entries to the cache, those after a missing one excepted.

        Raises:
          Damaged: an entry does not fit its name or its parent.
        """
        nodes: dict[str, Node] = {}
        for name, (age, entry, check) in sorted(
            entries.items(), key=lambda item: item[1][1].start
        ):
            before = nodes.get(entry.parent)
            if entry.parent and before is None:
                (self.path / name).unlink()  # left when its parent was removed
                continue
            text = entry.tokens
            if before is not None:
                text = np.concatenate([before.text(), text])
            if self.name_of(text) != name or len(text) != entry.start + len(
                entry.tokens
            ):
                raise Damaged(f"{name} does not have the text of its name")
            if text.min() < 0 or text.max() >= self.num_tokens:
                raise Damaged(f"{name} has tokens that the model does not have")
            node = self.prefixes.restore(text, before, entry.rows, entry.kept, age)
            if node is None:
                (self.path / name).unlink()  # another file has its first token
                continue
            node.check = self._checked(name, check)
            nodes[name] = node

    def _checked(self, name: str, check: Callable[[], bool]) -> Callable[[], bool]:
        """Returns a function that checks a file and sets it aside if it is damaged."""

        def checked() -> bool:
            if check():
                return True
            file = self.path / name
            with suppress(OSError):
                os.rename(file, file.with_suffix(SET_ASIDE))
            self.say(f"{file}: damaged; set aside as {file.stem}{SET_ASIDE}")
            return False

        return checked

    def name_of(self, text: np.ndarray) -> str:
        """Returns the name of the file of a node that ends a text [n] int32."""
        data = self.key.encode() + np.asarray(text, np.int32).tobytes()
        return f"{hashlib.sha256(data).hexdigest()[:32]}.prefix"

    def changed(self, node: Node, removed: bool) -> None:
        """Notes that a node's file is to be written or removed."""
        if self._failed:
            return
        text = node.text()
        entry = None
        if not removed:
            parent = self.name_of(text[: node.start]) if node.start else ""
            entry = Entry(parent, node.start, node.tokens, node.rows, node.kept)
        with self._wake:
            self._pending[self.name_of(text)] = entry
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                name = next(iter(self._pending))
                entry = self._pending[name]
                # A file counts only if those before it are there, so they come first.
                while entry is not None and self._pending.get(entry.parent) is not None:
                    name, entry = entry.parent, self._pending[entry.parent]
            try:
                if entry is None:
                    (self.path / name).unlink(missing_ok=True)
                else:
                    write_whole(self.path / name, written(entry), PRIVATE)
            except OSError as error:
                self._stop(error)
            with self._wake:
                if self._failed:
                    self._pending.clear()
                elif self._pending.get(name) is entry:
                    del self._pending[name]
                self._wake.notify_all()
                if self._failed:
                    return

    def close(self, wait_s: float = FLUSH_S) -> None:
        """Writes what is still to be written, for at most `wait_s` seconds, and unlocks
        the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
