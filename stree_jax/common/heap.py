"""Garbage collection, and memory that the process has freed."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables garbage collection in a `with` block or a decorated function.

    For work that creates many objects that stay alive, as imports, tracing a program
    and reading a vocabulary do. Scanning them repeatedly takes 0.1 s for the programs
    of tree "auto", a sixth of the time of imports, and a second for a vocabulary of
    262,144 tokens.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def return_free_memory(collect: bool = True) -> None:
    """Returns freed memory to the system. glibc keeps much of it otherwise: some
    hundred megabytes after programs were compiled. Other C libraries return it
    themselves.

    Args:
      collect: True to collect garbage first, which takes about 0.1 s.
    """
    if collect:
        gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # None for other C libraries, such as musl
        trim(0)
