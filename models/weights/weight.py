"""What a weight format provides: a `Format` that stores matrices, and its `Weight`s."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


class Weight(ABC):
    """A matrix [m, k] that a format stores in its own way: a pytree of arrays.

    The first two axes of each array are those of the matrix, in units of some rows and
    columns: [m / rows, k / columns, ...]. So a device's part of a weight is a part of
    each array. An array without an axis is the same in every part.
    """

    @property
    @abstractmethod
    def format(self) -> "Format":
        """The format that the weight is stored in."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[m, k]."""

    @abstractmethod
    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T.

        Args:
          rows: [t, k] of any float dtype.
          valid_count: [B] int32, see `linear`. If None, all rows are valid.
          native: if True, use the compiled CPU kernel on a CPU; `unsupported` returned
            None for it.

        Returns:
          [t, m] float32.
        """

    @abstractmethod
    def rows(self, ids: jax.Array) -> jax.Array:
        """Looks up rows [..., k] float32 of the matrix."""

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        """Returns why no compiled kernel can take such a product, or None."""
        return f"there is no kernel for {self.format.name}"

    def matrix(self) -> jax.Array:
        """Returns the matrix [m, k] in float32."""
        return self.rows(jnp.arange(self.shape[0]))


@dataclass(frozen=True)
class Packed:
    """A matrix as a checkpoint stores it in few bits.

    Attributes:
      scheme: name of the layout, such as "nvfp4" or "q4_k".
      shape: [m, k].
      arrays: the stored arrays by name, such as "weight" and "scale".
    """

    scheme: str
    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Format(ABC):
    """How the matrices of a model are stored that only products and lookups read.

    A format is hashable and compares by value; `dtype=` arguments take its name.

    Attributes:
      name: of the format.
      dtype: of caches, records, and all parameters but those matrices.
      plain: True if those matrices are arrays of this dtype, too; only such models are
        written to disk.
    """

    name: str
    dtype: np.dtype
    plain: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def store(self, matrix: Any, columns: int | None = None) -> Any:
        """Stores a matrix as a weight.

        Args:
          matrix: [m, k] of any float dtype.
          columns: columns of the whole matrix, if this is a part of it that was cut
            between the units of the weight's arrays: the result is that part of the
            whole weight. If None, the matrix is whole.
        """

    def source_dtype(self, stored: str) -> np.dtype:
        """Returns the dtype in which `store` gets a matrix that a checkpoint holds in
        the dtype `stored`."""
        return BFLOAT16 if stored == BFLOAT16.name else FLOAT32

    def keeps(self, scheme: str) -> bool:
        """True if `keep` takes matrices that a checkpoint stores in this scheme."""
        return False

    def keep(self, blocks: Sequence[Packed]) -> Weight:
        """Makes a weight of packed matrices, stacked by rows, with the same numbers."""
        raise NotImplementedError(f"{self.name} keeps no packed matrices")

    def abstract(self, shape: tuple[int, ...]) -> Any:
        """Returns a weight of `jax.ShapeDtypeStruct`."""
        return _abstract(self, shape)


@cache
def _abstract(format: Format, shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(format.store, jax.ShapeDtypeStruct(shape, jnp.float32))


def unit(weight: Any, axis: int) -> int:
    """Returns how many rows (axis 0) or columns (axis 1) of a weight, or places of any
    array, cannot be separated."""
    arrays = [x for x in jax.tree.leaves(weight) if x.ndim > axis]
    return max(weight.shape[axis] // x.shape[axis] for x in arrays)


def take(weight: Any, places: Sequence[slice], axis: int) -> Any:
    """Takes a device's part of a weight or of any other parameter, on the host.

    Args:
      weight: of NumPy arrays.
      places: along this axis, whole units; see `unit`.

    Raises:
      ValueError: a place begins or ends within a unit.
    """

    def taken(array: np.ndarray) -> np.ndarray:
        if array.ndim <= axis:
            return array
        size = weight.shape[axis] // array.shape[axis]
        if any(place.start % size or place.stop % size for place in places):
            raise ValueError(f"weight: {size} of axis {axis} cannot be separated")
        before = (slice(None),) * axis
        pieces = [
            array[(*before, slice(place.start // size, place.stop // size))]
            for place in places
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=axis)

    return jax.tree.map(taken, weight)
