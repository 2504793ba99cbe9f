"""Where the command keeps compiled programs, so that only a first run compiles them.

Nothing here imports jax: it reads the environment when it is imported later.
"""

import os
import shutil
import warnings
from pathlib import Path

from stree_jax.cache_folder import cache_folder

LEAST_FREE_BYTES = 64 << 20  # with less room on the disk, entries would be cut short


def cache_directory() -> Path | None:
    """The folder for compiled programs, there or not; None if it is turned off."""
    folder = cache_folder()
    return None if folder is None else folder / "xla"


def keep_programs() -> None:
    """Let jax keep every compiled program of this process, and of its children.

    Call it before jax is imported. A folder that jax's own variable names is left so.
    Where the folder cannot be written to, nothing is kept, and nothing is said.
    """
    directory = cache_directory()
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or directory is None:
        return
    if not _has_room(directory):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
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
