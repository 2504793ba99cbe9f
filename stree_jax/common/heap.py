"""Returns memory that the process has freed to the system."""

import ctypes
import gc
import sys


def return_free_memory() -> None:
    """Returns freed memory to the system. glibc keeps much of it otherwise: some
    hundred megabytes after programs were compiled. Other C libraries return it
    themselves."""
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # None for other C libraries, such as musl
        trim(0)
