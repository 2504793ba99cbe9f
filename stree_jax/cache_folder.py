"""Where things are kept between runs: compiled programs, and how long steps take."""

import os
from pathlib import Path

OFF = ("", "off")


def cache_folder() -> Path | None:
    """`$STREE_JAX_CACHE`, or the user's cache folder's `stree-jax`; None if turned off.

    It need not exist.
    """
    named = os.environ.get("STREE_JAX_CACHE")
    if named is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        named = os.path.join(base if os.path.isabs(base) else "~/.cache", "stree-jax")
    expanded = os.path.expanduser(named)
    if named in OFF or expanded.startswith("~"):  # a user without a home
        return None
    return Path(expanded).absolute()
