"""Reads compiled programs in a thread, while the model loads.

XLA reads a program without Python's lock, but takes 0.2 to 0.5 s for it. So a command
notes which programs it used, and its next start reads these before it needs them. A
program that is read ahead is used only where its file is the one that was asked for.
"""

import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from stree_jax.common.cache_folder import only_the_user_writes
from stree_jax.common.whole_file import write_whole

FILE = "starts.json"  # names of the programs' files by start, the last start last
MOST_BYTES = 2**18  # of that file; larger ones are ignored
MOST_STARTS = 64  # in that file; older ones are dropped
MOST_PROGRAMS = 4  # of a start; a chat uses more later, while it waits for input
A_PROGRAM = re.compile(r"\w+-[0-9a-f]{64}")


class ReadingAhead:
    """The programs that this process is expected to use, and those it has used."""

    def __init__(self) -> None:
        self.start: str | None = None  # the name of this start
        self._used: list[str] = []
        self._noted: list[str] = []  # in the file, for this start
        self._read: dict[str, Future[Any]] = {}

    def expect(self, folder: Path, read: Callable[[Path], Any]) -> None:
        """Starts to read the programs that the last start of this name used.

        Args:
          folder: their folder.
          read: returns the program in a file, or None.
        """
        if self.start is None or self._noted:
            return
        self._noted = _starts(folder).get(self.start, [])
        pool = ThreadPoolExecutor(1)  # its thread ends with its work
        self._read = {n: pool.submit(read, folder / n) for n in self._noted}
        pool.shutdown(wait=False)

    def program(self, file: Path) -> Any:
        """Returns what was read ahead from a file, and forgets it; None if nothing."""
        found = self._read.pop(file.name, None)
        return None if found is None else found.result()

    def note(self, file: Path) -> None:
        """Notes that this process uses the program in a file."""
        if self.start is None or len(self._used) >= MOST_PROGRAMS:
            return
        self._used.append(file.name)
        if len(self._used) >= len(self._noted):
            self._read.clear()  # the others were for other arguments
        if file.name in self._noted:
            return
        self._noted = list(self._used)
        starts = _starts(file.parent)
        starts.pop(self.start, None)
        starts[self.start] = self._noted
        with suppress(OSError):
            if only_the_user_writes(file.parent):
                last = dict(list(starts.items())[-MOST_STARTS:])
                write_whole(file.with_name(FILE), json.dumps(last).encode())

    def forget(self) -> None:
        """Frees what was read ahead, and notes and reads nothing more."""
        self.start = None
        self._read.clear()


def name_of_start(parts: Any) -> str:
    """Returns a name for starts with the same options."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _starts(folder: Path) -> dict[str, list[str]]:
    """Returns the names of the programs of each start; those that are well-formed."""
    file = folder / FILE
    try:
        mine = only_the_user_writes(folder) and only_the_user_writes(file)
        if not mine or not file.is_file() or file.stat().st_size > MOST_BYTES:
            return {}
        found = json.loads(file.read_bytes())
        entries = found.items()
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}
    return {start: names for start, names in entries if _are_programs(names)}


def _are_programs(names: Any) -> bool:
    if not isinstance(names, list) or len(names) > MOST_PROGRAMS:
        return False
    return all(isinstance(n, str) and A_PROGRAM.fullmatch(n) for n in names)
