"""Keeps automata of tokens in the cache folder: building one for a large vocabulary
takes up to some seconds.

A file is read as plain arrays, and counts only if its shapes and values fit; anything
else is built anew. Sources of a file are the vocabulary, the expression and this
package's version, which are in its name as a digest.
"""

import hashlib
import io
from contextlib import suppress
from pathlib import Path

import numpy as np

from stree_jax.common.cache_folder import cache_folder, only_the_user_writes
from stree_jax.common.version import __version__
from stree_jax.common.whole_file import write_whole
from stree_jax.constraints.token_tables import MOST_FORCED, TokenTables

FOLDER = "constraints"
FORMAT = 2  # raise it if the tables change
MOST_FILES = 256  # those not used for longest are removed first
MOST_BYTES = 2**26  # of a file
NAMES = ("classes", "following", "may_end", "forced")


def kept_tables(key: str, num_tokens: int) -> TokenTables | None:
    """Returns the automaton of a key, or None if it is not kept.

    Args:
      key: digest of vocabulary and expression.
      num_tokens: V.
    """
    file = _file(key)
    if file is None:
        return None
    try:
        if not (only_the_user_writes(file.parent) and only_the_user_writes(file)):
            return None
        if file.stat().st_size > MOST_BYTES:
            return None
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            found = TokenTables(*(arrays[name] for name in NAMES))
        if not _fits(found, num_tokens):
            return None
        with suppress(OSError):
            file.touch()
    except Exception:  # damaged in any way: it is built anew
        return None
    return found


def keep_tables(key: str, tables: TokenTables) -> None:
    """Writes an automaton to its file, if there is a cache folder that can be
    written."""
    file = _file(key)
    if file is None:
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: getattr(tables, name) for name in NAMES})
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not only_the_user_writes(file.parent):
            return
        write_whole(file, buffer.getvalue())
        old = sorted(file.parent.iterdir(), key=lambda f: f.stat().st_mtime)
        for extra in old[:-MOST_FILES]:
            extra.unlink(missing_ok=True)


def _file(key: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    name = hashlib.sha256(f"{FORMAT} {__version__} {key}".encode()).hexdigest()
    return folder / FOLDER / f"{name}.npz"


def _fits(tables: TokenTables, num_tokens: int) -> bool:
    """True if arrays have the shapes, types and ranges of an automaton."""
    states, classes = tables.following.shape
    shapes = (num_tokens,), (states, classes), (states,), (states, MOST_FORCED)
    kinds = "i", "i", "b", "i"
    for name, shape, kind in zip(NAMES, shapes, kinds, strict=True):
        array = getattr(tables, name)
        if array.shape != shape or array.dtype.kind != kind:
            return False
    tokens = (tables.classes >= 0) & (tables.classes < classes)
    steps = (tables.following >= -1) & (tables.following < states)
    drafts = (tables.forced >= -1) & (tables.forced < num_tokens)
    return bool(tokens.all() and steps.all() and drafts.all())
