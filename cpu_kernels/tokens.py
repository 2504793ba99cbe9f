"""Walks the bytes of all tokens through an automaton, in the compiled library."""

import ctypes

import numpy as np

from stree_jax.cpu_kernels.library import function, level

WALK = "stree_token_walk"


def token_walk(
    steps: np.ndarray, data: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Computes the hashes of pieces of text, see `constraints.token_tables`.

    Args:
      steps: [S, K] int32. State after each of K symbols; negative if it is not allowed.
      data: uint8. The symbols of all pieces, sorted, none of them empty.
      starts: [P + 1] int64. Where each piece begins, and the end of the last one.

    Returns:
      Hashes [P] uint64 of the states after each piece by the state before it, 0 for
      pieces that may follow no state; and the number [S] int64 of pieces that may
      follow each state. None if there are no kernels.
    """
    walk = None if level() is None else function(WALK)
    if walk is None:
        return None
    steps, data = np.ascontiguousarray(steps, np.int32), np.ascontiguousarray(data)
    starts = np.ascontiguousarray(starts, np.int64)
    pieces, (states, symbols) = len(starts) - 1, steps.shape
    hashes, counts = np.zeros(pieces, np.uint64), np.zeros(states, np.int64)
    sizes = [ctypes.c_int64(n) for n in (states, symbols, pieces)]
    arrays = [ctypes.c_void_p(x.ctypes.data) for x in (steps, data, starts)]
    ends = [ctypes.c_void_p(x.ctypes.data) for x in (hashes, counts)]
    walk(arrays[0], *sizes[:2], arrays[1], arrays[2], sizes[2], *ends)
    return hashes, counts
