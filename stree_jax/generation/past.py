"""The cached state of a batch, from which a later call continues."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stree_jax.generation.saved_past import (
    cut_back,
    key_of_target,
    load_past,
    save_past,
)
from stree_jax.models import Model, State
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.drafter import DraftState

MOST_ROWS_SHOWN = 8  # in `repr` and in a notebook


@dataclass(frozen=True)
class Past:
    """Cached state of a batch, from which a later call of `generate` continues.

    Attributes:
      target: state of the target model, on the device.
      drafter: state of the drafter. It is None after plain decoding.
      tokens: for each row, all of its tokens so far, with the prompt.

    Example:
      >>> model = stree_jax.load("demo")
      >>> first = stree_jax.generate(model, "x = ", max_new_tokens=4, keep_past=True)
      >>> more = stree_jax.generate(model, " + 1", max_new_tokens=4, past=first.past)
      >>> more.lengths.tolist()
      [4]
    """

    target: State
    drafter: DraftState
    tokens: list[list[int]]

    def save(self, path: str | os.PathLike[str], model: Model) -> None:
        """Writes the state to a safetensors file, or replaces it. The drafter's state
        is not saved: a draft model reads the text again when it next drafts. Only the
        user may read the file, because it contains the texts.

        Args:
          path: the file.
          model: the target model, whose weights the file then belongs to.

        Raises:
          CheckpointError: the file cannot be written.
        """
        save_past(Path(path), self.target, self.tokens, key_of_target(model))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> "Past":
        """Reads a file of `save`.

        Args:
          path: the file.
          model: the target model, with the weights that it had when it was saved.

        Raises:
          CheckpointError: the file cannot be read, is damaged, or belongs to another
            model.

        Example:
          >>> model = stree_jax.load("demo")
          >>> run = stree_jax.generate(model, "x = ", max_new_tokens=4, keep_past=True)
          >>> run.past.save("x.safetensors", model)
          >>> past = stree_jax.Past.load("x.safetensors", model)
          >>> past.tokens == run.past.tokens
          True
        """
        target, tokens = load_past(Path(path), model)
        return cls(target, None, tokens)

    def at(self, length: int | Sequence[int]) -> "Past":
        """Returns the state after the first `length` tokens of each row.

        Models whose layers are all attention can be cut back to any token, exactly. The
        result has no drafter's state: a draft model reads the text again when it next
        drafts.

        Args:
          length: number of tokens, or one for each row, from 1 to the row's length.

        Raises:
          ValueError: a length is out of range, or is shorter than its row and the model
            has recurrent layers, whose states cannot be cut back.
        """
        rows = len(self.tokens)
        lengths = [length] * rows if isinstance(length, int) else list(length)
        if len(lengths) != rows:
            raise ValueError(f"at: {len(lengths)} lengths for {rows} rows")
        for n, row in zip(lengths, self.tokens, strict=True):
            if not 1 <= n <= len(row):
                raise ValueError(f"at: want 1 to {len(row)} tokens, got {n}")
        if lengths == [len(row) for row in self.tokens]:
            return self
        target = cut_back(self.target, [n - 1 for n in lengths])
        cut = zip(lengths, self.tokens, strict=True)
        return Past(target, None, [row[:n] for n, row in cut])

    def rows(self, indices: Sequence[int]) -> "Past":
        """Returns the states of some rows, which may repeat: several prompts can
        continue one text that was prefilled once.

        Args:
          indices: the rows, one or more.

        Raises:
          ValueError: there is no such row.

        Example:
          >>> model = stree_jax.load("demo")
          >>> run = stree_jax.generate(model, "x = ", max_new_tokens=4, keep_past=True)
          >>> past = run.past.rows([0, 0])
          >>> ends = [" + 1", " - 1"]
          >>> both = stree_jax.generate(model, ends, max_new_tokens=4, past=past)
          >>> both.lengths.tolist()
          [4, 4]
        """
        most = len(self.tokens)
        if not len(indices) or not all(0 <= i < most for i in indices):
            raise ValueError(f"rows: want rows in 0..{most - 1}, got {list(indices)}")
        index = np.asarray(indices, np.int32)
        target, drafter = jax.tree.map(lambda x: x[index], (self.target, self.drafter))
        return Past(target, drafter, [list(self.tokens[i]) for i in indices])

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, few([len(row) for row in self.tokens])))
        size = size_of((self.target, self.drafter)) / 1e6
        drafter = "no drafter" if self.drafter is None else "a drafter"
        return (
            f"Past({counted(len(self.tokens), 'row')} of {lengths} tokens, "
            f"{size:.1f} MB with {drafter})"
        )


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """Returns a number and its noun, such as "1 token" or "2 tokens"."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def few(values: Sequence[Any], most: int = MOST_ROWS_SHOWN) -> list[Any]:
    """Returns the first values, and "..." if there are more."""
    return [*values[:most], *["..."] * (len(values) > most)]
