"""Weights on pages of 2 MB: a step reads all of them, and misses fewer addresses."""

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

import jax

PAGE = 2**21  # bytes
COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; older ones refuse it, and nothing changes
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def to_large_pages(arrays: Iterable[jax.Array]) -> Thread | None:
    """Move what lies in a CPU's memory to large pages, beside whatever comes next.

    Numbers and addresses stay; the system copies page by page, about 1 GB a second, on
    a core that tracing and compiling leave idle. Where it can't, nothing changes.

    Returns:
      the thread that does it; None: nothing is large enough, or this system has no
      such pages or is told not to use them.
    """
    if not sys.platform.startswith("linux") or not _allowed():
        return None
    large = [array for array in arrays if array.nbytes >= PAGE and _here(array)]
    if not large:
        return None
    thread = Thread(target=_collapse, args=(large,), daemon=True)
    thread.start()
    return thread


def _allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:
        return False


def _here(array: jax.Array) -> bool:
    return array.is_fully_addressable and {
        device.platform for device in array.devices()
    } == {"cpu"}


def _collapse(arrays: list[jax.Array]) -> None:
    """The whole pages of each; it is kept until it was looked at."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while arrays:
        for shard in arrays.pop().addressable_shards:
            try:
                first = shard.data.unsafe_buffer_pointer()
            except RuntimeError:  # it was deleted meanwhile
                continue
            begin = -(-first // PAGE) * PAGE
            end = (first + shard.data.nbytes) // PAGE * PAGE
            if end > begin:
                madvise(begin, end - begin, COLLAPSE)
