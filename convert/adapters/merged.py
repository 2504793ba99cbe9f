"""Adds an adapter's matrices to the tensors of its base model, one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.base.files import Index
from stree_jax.convert.families.tensors import is_finite
from stree_jax.convert.tensors.stored_tensors import Tensors, at_once


@dataclass(frozen=True)
class Product:
    """A product of two matrices of an adapter, which is added to a tensor [m, k].

    Attributes:
      up: name of the adapter's tensor [m, rank].
      down: name of the adapter's tensor [rank, k].
      scale: factor of the product.
      transposed: True if both are stored transposed, as for an embedding.
      norms: name of the adapter's tensor [m] with the norms of the sum's rows (DoRA).
        If None, the sum is not normalized.
    """

    up: str
    down: str
    scale: float
    transposed: bool = False
    norms: str | None = None


@dataclass(frozen=True)
class Change:
    """How an adapter changes one tensor of its base model.

    Attributes:
      base: name of the base's tensor to start from.
      whole: name of the adapter's tensor that replaces it. If None, it is not replaced.
      added: the product that is added. If None, nothing is.
    """

    base: str
    whole: str | None = None
    added: Product | None = None


@dataclass(frozen=True, kw_only=True)
class Merged(Tensors):
    """The tensors of a base model with an adapter merged into them.

    A changed tensor is a plain one, even if the base's is quantized.

    Attributes:
      adapter: the adapter's tensors.
      changes: the changes, by the names of the tensors in `tensors`.
    """

    adapter: Tensors
    changes: Mapping[str, Change]

    def scheme(self, name: str) -> str | None:
        return None if name in self.changes else super().scheme(name)

    def is_plain(self, name: str) -> bool:
        change = self.changes.get(name)
        if change is None:
            return super().is_plain(name)
        normalized = change.added is not None and change.added.norms is not None
        return not normalized and (
            change.whole is not None or super().is_plain(change.base)
        )

    def read(self, name: str, dtype: Any = np.float32, index: Index = ()) -> np.ndarray:
        """Reads a tensor as `Tensors.read`. A sum is float32."""
        change = self.changes.get(name)
        if change is None:
            return super().read(name, dtype, index)
        if change.added is None:
            return self._start(change, dtype, index)
        if self.is_plain(name):
            return self._sum(change, change.added, index)
        return self._sum(change, change.added)[index]

    def _start(self, change: Change, dtype: Any, index: Index) -> np.ndarray:
        """Reads the tensor that a change starts from."""
        if change.whole is not None:
            return self.adapter.read(change.whole, dtype, index)
        return super().read(change.base, dtype, index)

    def _sum(self, change: Change, added: Product, index: Index = ()) -> np.ndarray:
        """Computes a tensor with the adapter's product added, in float32."""
        total = self._start(change, np.float32, index).astype(np.float32)  # a copy
        up, down = self._matrices(added)
        rows, columns = (*index, slice(None), slice(None))[:2]
        up, down = up[rows], down[:, columns]
        for piece in at_once(total.shape):
            total[piece] += up[piece] @ down
        if added.norms is not None:
            norms = self._matrix(added.norms) / np.linalg.norm(total, axis=1)
            total *= norms[:, None]
        return total

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the matrices [m, rank], with the scale, and [rank, k] float32 whose
        product is added to a tensor. The rank is 0 if nothing is added."""
        change = self.changes.get(name)
        if change is None or change.added is None:
            m, k = self.tensors[name].shape
            return np.zeros((m, 0), np.float32), np.zeros((0, k), np.float32)
        return self._matrices(change.added)

    def _matrices(self, added: Product) -> tuple[np.ndarray, np.ndarray]:
        """Reads the matrices of a product; see `factors`."""
        up, down = self._matrix(added.up), self._matrix(added.down)
        if added.transposed:
            up, down = up.T, down.T
        return np.float32(added.scale) * up, down

    def _matrix(self, name: str) -> np.ndarray:
        """Reads a tensor of the adapter in float32.

        Raises:
          CheckpointError: a number is not finite.
        """
        numbers = self.adapter.read(name).astype(np.float32, copy=False)
        if not is_finite(numbers):
            file = self.adapter.tensors[name].file
            raise CheckpointError(f"{file}: {name}: has numbers that are not finite")
        return numbers
