"""Where the command keeps compiled programs, so that only a first run compiles them.

Nothing here imports jax: it reads the environment when it is imported later.
"""

import os
import shutil
import warnings
from pathlib import Path

OFF = ("", "off")
LEAST_FREE_BYTES = 64 << 20  # with less room on the disk, entries would be cut short


def cache_directory() -> Path | None:
    """The folder for compiled programs, there or not; None if it is turned off.

    It is `xla` in `$STREE_JAX_CACHE`, or else in the user's cache folder's `stree-jax`.
    """
    named = os.environ.get("STREE_JAX_CACHE")
    if named is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        named = os.path.join(base if os.path.isabs(base) else "~/.cache", "stree-jax")
    expanded = os.path.expanduser(named)
    if named in OFF or expanded.startswith("~"):  # a user without a home
        return None
    return Path(expanded, "xla").absolute()


def keep_programs() -> None:
    """Let jax keep every compiled program of this process, and of its children.

    Call it before jax is imported. Settings that are in the environment already stand.
    Where the folder cannot be written to, nothing is kept, and nothing is said.
    """
    directory = cache_directory()
    if directory is None or not _has_room(directory):
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # An entry that cannot be read or written costs time, and no more than that.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")


def _has_room(directory: Path) -> bool:
    """Make the folder, and tell whether it can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
        return writable and shutil.disk_usage(directory).free >= LEAST_FREE_BYTES
    except OSError:
        return False


def kept_programs() -> Path | None:
    """The folder that this process keeps programs in, or None."""
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(named) if named else None
