"""The folder in which compiled programs and measured step times are cached."""

import os
from pathlib import Path

OFF = ("", "off")


def cache_folder() -> Path | None:
    """Returns `$STREE_JAX_CACHE`, by default `stree-jax` in the user's cache folder, or
    None if caching is turned off. The folder need not exist."""
    named = os.environ.get("STREE_JAX_CACHE")
    if named is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        named = os.path.join(base if os.path.isabs(base) else "~/.cache", "stree-jax")
    expanded = os.path.expanduser(named)
    if named in OFF or expanded.startswith("~"):  # a user without a home directory
        return None
    return Path(expanded).absolute()


def only_the_user_writes(path: Path) -> bool:
    """True if only the user can write to a file or folder.

    Raises:
      OSError: it does not exist.
    """
    about = path.lstat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022
