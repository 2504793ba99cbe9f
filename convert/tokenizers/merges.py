"""Finds the merges of a SentencePiece vocabulary, which files do not store.

Any two pieces whose texts form a third piece may merge. A vocabulary of 262,144 pieces
has 1.3 million places at which a piece could be divided. So parts of pieces are looked
up with NumPy, by hashes of 64 bits.
"""

from collections.abc import Sequence

import numpy as np

# Odd, so that powers have inverses modulo 2**64. If two pieces have equal hashes with
# one number, the next is tried.
BASES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)


class Hashes:
    """Polynomial hashes, modulo 2**64, of parts of texts.

    Attributes:
      starts: [n + 1] int64. Where each text begins in the concatenation of all n.
    """

    def __init__(self, texts: Sequence[str], base: int) -> None:
        letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        self.starts = np.concatenate([[0], lengths.cumsum()])
        count = len(letters)
        self._inverse = _powers(pow(base, -1, 2**64), count)
        terms = (letters.astype(np.uint64) + np.uint64(1)) * _powers(base, count)[:-1]
        self._sums = np.concatenate([np.zeros(1, np.uint64), terms.cumsum()])

    def of(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the hashes [k] uint64 of the letters begin[i] .. end[i] - 1."""
        return (self._sums[end] - self._sums[begin]) * self._inverse[begin]


def _powers(base: int, count: int) -> np.ndarray:
    """Returns base ** i modulo 2**64 for i = 0 .. count, as [count + 1] uint64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return factors.cumprod()


def pairs(texts: Sequence[str], may_form: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the pairs of texts whose concatenation is one of the texts.

    Args:
      texts: n different texts.
      may_form: [n] bool. Texts that pairs may form.

    Returns:
      Indices (left, right, whole), each [k] int64.

    Raises:
      ValueError: the texts are not different, or their hashes cannot be told apart.
    """
    for base in BASES:
        hashes = Hashes(texts, base)
        starts, ends = hashes.starts[:-1], hashes.starts[1:]
        known = hashes.of(starts, ends)
        order = known.argsort()
        known = known[order]
        if (known[1:] != known[:-1]).all():
            break
    else:
        raise ValueError("the texts of two tokens have equal hashes")

    def find(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the index of the text with each hash, or -1."""
        wanted = hashes.of(begin, end)
        ascending = wanted.argsort()  # neighbours are searched in the same cache lines
        wanted = wanted[ascending]
        places = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        found = np.empty(len(wanted), np.int64)
        found[ascending] = np.where(known[places] == wanted, order[places], -1)
        return found

    formed = np.flatnonzero(may_form & (ends - starts > 1))
    inner = (ends - starts - 1)[formed]  # places between letters
    whole = formed.repeat(inner)
    first = np.arange(len(whole)) - (inner.cumsum() - inner).repeat(inner)
    cut = starts[whole] + 1 + first
    left = find(starts[whole], cut)
    some = left >= 0
    whole, cut, left = whole[some], cut[some], left[some]
    right = find(cut, ends[whole])
    some = right >= 0
    whole, left, right = whole[some], left[some], right[some]
    return left, right, whole
