"""Creates directories and files atomically: they are complete, or do not exist."""

import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn

CHECK = 0.05  # seconds between two looks at a directory that is being removed
REMOVALS = 40  # looks at most
ABSENCES = 10  # looks in a row that find nothing, until it counts as removed


@contextmanager
def atomic_directory(dst: Path, warn: Warn = warnings.warn) -> Iterator[Path]:
    """Creates a temporary directory that is renamed to `dst` if the block succeeds.

    If the process is killed, `dst` does not exist or is complete, and the next process
    that writes to the same path removes the leftovers.

    Args:
      dst: path of the new directory.
      warn: called with one line if leftovers were removed.

    Yields:
      The temporary directory, a sibling of `dst`.

    Raises:
      CheckpointError: `dst` exists, its parent does not exist, or it cannot be written.
    """
    with _beside(dst, warn) as temporary:
        yield temporary
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o755 if file.is_dir() else 0o644)
        os.rename(temporary, dst)


@contextmanager
def atomic_file(dst: Path, warn: Warn = warnings.warn) -> Iterator[Path]:
    """Does the same as `atomic_directory` for one file.

    Yields:
      The path of the temporary file, which the block creates.
    """
    with _beside(dst, warn) as temporary:
        file = temporary / "file"
        yield file
        file.chmod(0o644)
        os.rename(file, dst)


@contextmanager
def _beside(dst: Path, warn: Warn) -> Iterator[Path]:
    """Yields a temporary sibling directory of `dst`, and removes what is left of it.

    Raises:
      CheckpointError: as in `atomic_directory`.
    """
    dst = dst.absolute()
    try:
        if dst.exists() or dst.is_symlink():
            raise CheckpointError(f"{dst}: exists already; choose another place")
        if not dst.parent.is_dir():
            raise CheckpointError(f"{dst.parent}: no such directory")
        temporary, lock = _temporary(dst, warn)
    except OSError as error:
        raise CheckpointError(f"{dst}: cannot be written ({error})") from error
    absences = 1
    try:
        yield temporary
    except CheckpointError:
        raise
    except Exception as error:  # each writer raises its own exception for a full disk
        absences = ABSENCES  # its other threads may still be writing
        if (problem := os_problem(error)) is None:
            raise
        raise CheckpointError(f"{dst}: cannot be written ({problem})") from error
    finally:
        _remove(temporary, absences)
        if lock is not None:
            os.close(lock)


def _remove(directory: Path, absences: int) -> None:
    """Removes a directory in which threads of a failed write may still create files.
    They also create the directory again, so it must be absent at several looks."""
    absent = 0
    for _ in range(REMOVALS):
        shutil.rmtree(directory, ignore_errors=True)
        absent = 0 if directory.exists() else absent + 1
        if absent == absences:
            return
        time.sleep(CHECK)


def os_problem(error: Exception) -> str | None:
    """Returns the operating system's message for an error, such as a full disk, or None
    if the error is of another kind.

    safetensors and tokenizers report "(os error 28)", tensorstore
    "[os_error_code='28']".
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"os[ _]error(?:_code=')?[ ]?(\d+)", str(error))
    return None if found is None else os.strerror(int(found[1]))


def _temporary(dst: Path, warn: Warn) -> tuple[Path, int | None]:
    """Creates a temporary sibling of `dst` and locks it. Removes those of processes
    that have ended.

    The operating system releases the lock when the process ends, for any reason.
    """
    prefix = f".{dst.name[:50]}.tmp-"  # a name has at most 255 bytes
    for left in sorted(dst.parent.iterdir()):
        if re.fullmatch(re.escape(prefix) + r"\w{8}", left.name):
            with suppress(OSError):  # no locks here: it may be in use, so keep it
                if (lock := _lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
                    warn(f"{left}: removed (left by a process that was killed)")
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=dst.parent))
        try:
            if (lock := _lock(temporary)) is not None:
                return temporary, lock
        except OSError:  # a file system without locks
            return temporary, None


def _lock(directory: Path) -> int | None:
    """Locks a directory and returns the file descriptor that holds the lock. Returns
    None if another process holds it or has removed the directory.

    Raises:
      OSError: the file system does not support locks.
    """
    import fcntl

    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(directory), os.fstat(lock)):
            return lock  # locked, and still the same directory
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
