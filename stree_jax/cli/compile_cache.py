"""The folder in which the command keeps compiled programs, so that only a first run
compiles them.

Nothing here imports jax, which reads the environment when it is imported later.
"""

import os
import shutil
import warnings
from pathlib import Path

from stree_jax.common.cache_folder import cache_folder
from stree_jax.common.programs import keep_in

MIN_FREE_BYTES = 64 << 20  # on the disk; with less, entries would be cut short


def cache_directory() -> Path | None:
    """Returns the folder for compiled programs, which may not exist yet, or None if the
    cache is turned off."""
    folder = cache_folder()
    return None if folder is None else folder / "xla"


def keep_programs() -> None:
    """Makes jax cache every compiled program of this process and of its children.

    Must be called before jax is imported. If JAX_COMPILATION_CACHE_DIR is set, that
    folder is used. If the folder cannot be written to, nothing is cached, silently.
    """
    directory = cache_directory()
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or directory is None:
        return
    if not _is_usable(directory):
        return
    keep_in(directory.with_name("programs"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # An entry that cannot be read or written only costs time.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")


def _is_usable(directory: Path) -> bool:
    """Creates the folder if necessary. True if it can be written to and its disk has
    enough free space."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
        return writable and shutil.disk_usage(directory).free >= MIN_FREE_BYTES
    except OSError:
        return False


def kept_programs() -> Path | None:
    """Returns the folder in which this process caches programs, or None."""
    name = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(name) if name else None
