"""The interface of weight formats: `Format` stores matrices as `Weight`s."""

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
    """A matrix [m, k] in the storage of its format: a pytree of arrays.

    Each array has shape [m / r, k / c, ...], where r and c are that array's unit sizes
    in rows and columns. A device's part of a weight is therefore a slice of each array.
    An array that lacks one of the two axes is the same in every part along that axis.
    """

    @property
    @abstractmethod
    def format(self) -> "Format":
        """The format that the weight is stored in."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape [m, k] of the matrix."""

    @abstractmethod
    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T.

        Args:
          rows: [t, k] of any float dtype.
          valid_count: [B] int32, see `linear`. If None, all rows are valid.
          native: True to use the compiled CPU kernel on a CPU. Only allowed if
            `unsupported` returns None for these arguments.

        Returns:
          [t, m] float32.
        """

    @abstractmethod
    def rows(self, ids: jax.Array) -> jax.Array:
        """Looks up the rows [..., k] float32 with ids [...] int32."""

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        """Returns why the compiled kernel cannot compute this product. None if it
        can."""
        return f"there is no kernel for {self.format.name}"

    def matrix(self) -> jax.Array:
        """Returns the matrix [m, k] in float32."""
        return self.rows(jnp.arange(self.shape[0]))


@dataclass(frozen=True)
class Packed:
    """A quantized matrix in the layout of a checkpoint.

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
    """A storage format of a model's weight matrices.

    It applies to the matrices that only products and row lookups read. A format is
    hashable and compares by value; `dtype=` arguments accept its name.

    Attributes:
      name: name of the format.
      dtype: dtype of KV caches, records, and all other parameters.
      plain: True if the matrices are plain arrays of `dtype`. Only models in such a
        format can be saved.
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
          columns: number of columns of the whole matrix, if `matrix` is only a part of
            it, divided between units. The result is then that part of the whole weight.
            If None, the matrix is whole.
        """

    def source_dtype(self, stored: str) -> np.dtype:
        """Returns the dtype in which `store` receives a matrix whose dtype in the
        checkpoint is `stored`."""
        return BFLOAT16 if stored == BFLOAT16.name else FLOAT32

    def keeps(self, scheme: str) -> bool:
        """True if `keep` supports a checkpoint's quantization scheme."""
        return False

    def keep(self, blocks: Sequence[Packed]) -> Weight:
        """Stacks quantized matrices by rows to a weight, without changing their values.

        Raises:
          NotImplementedError: the format supports no quantization scheme.
        """
        raise NotImplementedError(f"{self.name} cannot keep quantized matrices")

    def abstract(self, shape: tuple[int, ...]) -> Any:
        """Returns a weight [m, k] with `jax.ShapeDtypeStruct`s instead of arrays."""
        return _abstract(self, shape)


@cache
def _abstract(format: Format, shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(format.store, jax.ShapeDtypeStruct(shape, jnp.float32))


def unit(weight: Any, axis: int) -> int:
    """Returns the unit of a weight along an axis: the number of consecutive rows (axis
    0) or columns (axis 1) that one element of an array stands for. Works for plain
    arrays of any rank, too.
    """
    arrays = [x for x in jax.tree.leaves(weight) if x.ndim > axis]
    return max(weight.shape[axis] // x.shape[axis] for x in arrays)


def take(weight: Any, places: Sequence[slice], axis: int) -> Any:
    """Takes a device's part of a weight or of any other parameter, on the host.

    Args:
      weight: a parameter of NumPy arrays.
      places: slices along the axis, in whole units (see `unit`).
      axis: the axis that devices divide.

    Raises:
      ValueError: a slice begins or ends inside a unit.
    """

    def taken(array: np.ndarray) -> np.ndarray:
        if array.ndim <= axis:
            return array
        size = weight.shape[axis] // array.shape[axis]
        if any(place.start % size or place.stop % size for place in places):
            raise ValueError(f"weight: cannot split units of {size} along axis {axis}")
        before = (slice(None),) * axis
        pieces = [
            array[(*before, slice(place.start // size, place.stop // size))]
            for place in places
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=axis)

    return jax.tree.map(taken, weight)
