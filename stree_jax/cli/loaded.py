"""Keeps the last pair of models loaded, in a process that runs several commands."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stree_jax.common.heap import return_free_memory
from stree_jax.common.programs import forget

T = TypeVar("T")


@dataclass
class _Loaded:
    """The last result of `remembered`, if `on`."""

    on: bool = False
    key: Any = None
    result: Any = None
    warned: tuple[warnings.WarningMessage, ...] = ()


_loaded = _Loaded()


def keep_loaded() -> None:
    """Makes `remembered` remember."""
    _loaded.on = True


def remembered(
    load: Callable[..., T], files: Callable[[], list[Path] | None], *args: Any
) -> T:
    """Returns `load(*args)`, or the result of the last call if its arguments and files
    are unchanged. Warnings of that call are given again.

    Args:
      load: the function.
      files: returns the files and folders that it reads. None if they are not known.
      args: its arguments.
    """
    paths = files() if _loaded.on else None
    if paths is None:
        return load(*args)
    key = load, args, [stamp for path in paths for stamp in _stamps(path)]
    if key != _loaded.key:
        if _loaded.result is not None:  # frees the memory of the other model first
            _loaded.key = _loaded.result = None
            forget()
            return_free_memory()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = load(*args)
        _loaded.key, _loaded.result, _loaded.warned = key, result, tuple(warned)
    for w in _loaded.warned:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    found: T = _loaded.result
    return found


def _stamps(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yields the name, size, inode and times of a file, or of each file of a folder. A
    GGUF file may have other shards in its folder, which count, too."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    elif path.suffix == ".gguf":
        files = sorted(path.parent.glob("*.gguf"))
    for file in files:
        about = file.stat()
        times = about.st_mtime_ns, about.st_ctime_ns
        yield str(file), about.st_size, about.st_ino, about.st_dev, *times
