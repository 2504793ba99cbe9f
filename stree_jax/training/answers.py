"""Reads answers of a target, from which drafters learn, with the target's states.

A file of answers is an .npz file with three arrays of integers: `tokens` [n, W], rows
of a prompt, its answer and padding; and `start` and `end` [n], so that row i's answer
is tokens[i, start[i]:end[i]]. Rows are documents: no training example crosses them, and
only tokens of answers are roots and drafts.

Letters: those of `training.tapped_drafters`; W tokens of a row of a file.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stree_jax.models import Model, Taps
from stree_jax.training.hidden_state_files import digest, keep_tapped
from stree_jax.training.texts import SUFFIXES
from stree_jax.training.train import Batch

SUFFIX = ".npz"
# What numpy raises for files that are damaged or are not archives of arrays.
UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)
HELD_OUT_EVERY = 20  # every 20th answer is held out
WIDTH_STEP = 64  # rows are padded to a multiple, so that few widths are compiled


@dataclass(frozen=True)
class Rows:
    """The answers of a file.

    Attributes:
      tokens: [n, W] int32.
      start, end: [n]. Row i's answer is tokens[i, start[i]:end[i]].
    """

    tokens: np.ndarray
    start: np.ndarray
    end: np.ndarray


class Stretch(NamedTuple):
    """A stretch of `Answers`."""

    tokens: np.ndarray
    states: np.ndarray
    first: int
    last: int


@dataclass(frozen=True)
class Answers:
    """Stretches that end with an answer. `cut` takes roots from them.

    Attributes:
      tokens: [n, T] int32.
      states: n arrays [T, 1 + m, d], the target's hidden state and m residual streams.
      first, last: [n]. The first and last token of each stretch that may be a root.
    """

    tokens: np.ndarray
    states: Sequence[np.ndarray]
    first: np.ndarray
    last: np.ndarray

    @property
    def identity(self) -> list[Any]:
        chosen = digest(self.tokens, self.first, self.last)
        return [len(self.tokens), *self.states[0].shape, chosen]

    @cached_property
    def chances(self) -> np.ndarray:
        """The frequency of each stretch, in proportion to its roots."""
        roots = self.last - self.first + 1
        return np.asarray(roots / roots.sum())

    def cut(self, rng: np.random.Generator, length: int, roots: int, M: int) -> Batch:
        """Returns a random stretch with random roots. A root is repeated only if the
        answer has fewer. `length` and M are those with which the answers were read."""
        row = rng.choice(len(self.tokens), p=self.chances)
        places = np.arange(self.first[row], self.last[row] + 1)
        places = rng.choice(places, roots, replace=len(places) < roots)
        return {
            "states": self.states[row],
            "tokens": self.tokens[row],
            "places": np.sort(places).astype(np.int32),
        }


def answer_files(text: Sequence[Path]) -> list[Path]:
    """Returns the files of answers in the one folder of a job's text; empty for other
    text.

    Raises:
      ValueError: the folder has files of answers and other files.
    """
    found = sorted(text[0].glob(f"*{SUFFIX}")) if len(text) == 1 else []
    names = [file.name for file in text[0].iterdir()] if found else []
    if others := [name for name in names if name.lower().endswith(SUFFIXES)]:
        raise ValueError(
            f"{text[0]}: want files of answers (*{SUFFIX}) or other text, not both: "
            f"{found[0].name}, {min(others)}"
        )
    return found


def read_rows(file: Path, num_tokens: int) -> Rows:
    """Reads a file of answers.

    Raises:
      ValueError: the file is damaged, or has an invalid row.
    """
    names = "tokens", "start", "end"
    try:
        with np.load(file, allow_pickle=False) as arrays:
            tokens, start, end = (np.asarray(arrays[name]) for name in names)
    except UNREADABLE as error:
        raise ValueError(f"{file}: want an .npz of {', '.join(names)}") from error
    if tokens.ndim != 2 or not start.shape == end.shape == tokens.shape[:1]:
        raise ValueError(f"{file}: want tokens [n, W], start [n] and end [n]")
    if not all(np.issubdtype(x.dtype, np.integer) for x in (tokens, start, end)):
        raise ValueError(f"{file}: want integers")
    if not ((0 < start) & (start <= end) & (end <= tokens.shape[1])).all():
        raise ValueError(f"{file}: want 0 < start <= end <= {tokens.shape[1]}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < num_tokens:
        raise ValueError(f"{file}: want tokens in 0..{num_tokens - 1}")
    return Rows(tokens.astype(np.int32), start.astype(np.int64), end.astype(np.int64))


def answer_tokens(files: Sequence[Path], num_tokens: int) -> np.ndarray:
    """Returns the tokens [n] of all answers."""
    found = [np.empty(0, np.int32)]
    for rows in (read_rows(file, num_tokens) for file in files):
        place = np.arange(rows.tokens.shape[1])[None]
        found.append(
            rows.tokens[(place >= rows.start[:, None]) & (place < rows.end[:, None])]
        )
    return np.concatenate(found)


def read_answers(
    target: Model, taps: Taps, files: Sequence[Path], work: Path, T: int, M: int
) -> tuple[Answers, Answers]:
    """Runs the target on answers, and stores its states in a file for each file of
    answers, so that files may be added later.

    Args:
      target: the target.
      taps: the target's layers whose residual streams the drafter reads.
      files: the files of answers.
      work: folder for the states.
      T: tokens of a stretch. Only the last T tokens of a row are used.
      M: number of drafts of a root.

    Returns:
      The answers to learn from, and held-out ones. Answers without roots are left out.

    Raises:
      ValueError: there are too few answers, or a file is invalid.
    """
    found: list[Stretch] = []
    for file in files:
        rows = read_rows(file, target.config.num_tokens)
        if not len(rows.tokens):
            continue
        width = max(T, -(-rows.tokens.shape[1] // WIDTH_STEP) * WIDTH_STEP)
        padding = (0, 0), (0, width + 1 - rows.tokens.shape[1])
        tokens = np.pad(rows.tokens, padding)  # the last token of a row is not read
        states = keep_tapped(target, tokens, work / f"{file.stem}.states", taps)
        for i, (start, end) in enumerate(zip(rows.start, rows.end, strict=True)):
            begin = max(int(end) - T, 0)
            part = slice(begin, begin + T)
            # The last draft of a root is a token of the answer.
            first, last = max(int(start) - 1 - begin, 1), int(end) - begin - 1 - M
            if first <= last:
                found.append(Stretch(tokens[i, part], states[i, part], first, last))
    if len(found) < 2:
        folder = files[0].parent
        raise ValueError(f"{folder}: want at least 2 answers, got {len(found)}")
    held = [x for i, x in enumerate(found) if i % HELD_OUT_EVERY == 0]
    learnt = [x for i, x in enumerate(found) if i % HELD_OUT_EVERY]
    return _joined(learnt), _joined(held)


def _joined(stretches: Sequence[Stretch]) -> Answers:
    tokens, states, first, last = zip(*stretches, strict=True)
    return Answers(np.stack(tokens), states, np.array(first), np.array(last))
