"""Moves weights to 2 MB pages, which reduces TLB misses: a step reads all weights."""

import atexit
import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread

import jax

PAGE = 2**21  # bytes
COLLAPSE = 25  # MADV_COLLAPSE, from Linux 6.1 on; older kernels refuse it harmlessly
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def to_large_pages(arrays: Iterable[jax.Array]) -> Thread | None:
    """Starts a thread that moves arrays in CPU memory to large pages.

    Values and addresses do not change. The operating system copies about 1 GB per
    second, on a core that is idle while JAX traces and compiles. Where it cannot,
    nothing changes.

    Returns:
      The thread. None if no array is large enough, or if the system has no large pages
      or is configured not to use them.
    """
    if not sys.platform.startswith("linux") or not _allowed():
        return None
    large = [array for array in arrays if array.nbytes >= PAGE and _is_on_cpu(array)]
    if not large:
        return None
    stop = Event()
    thread = Thread(target=_collapse, args=(large, stop), daemon=True)
    thread.start()

    def finish() -> None:
        """Ends the thread, which must not run while the interpreter shuts down."""
        stop.set()
        thread.join()

    atexit.register(finish)
    return thread


def _allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:
        return False


def _is_on_cpu(array: jax.Array) -> bool:
    return array.is_fully_addressable and {
        device.platform for device in array.devices()
    } == {"cpu"}


def _collapse(arrays: list[jax.Array], stop: Event) -> None:
    """Moves the whole pages of each array to large pages.

    Empties the list one by one, so that arrays stay alive only until their turn. Ends
    early if `stop` is set.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while arrays and not stop.is_set():
        for shard in arrays.pop().addressable_shards:
            try:
                first = shard.data.unsafe_buffer_pointer()
            except RuntimeError:  # the array has been deleted
                continue
            begin = -(-first // PAGE) * PAGE
            end = (first + shard.data.nbytes) // PAGE * PAGE
            if end > begin:
                madvise(begin, end - begin, COLLAPSE)
