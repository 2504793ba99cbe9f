"""The interface of stored matrices: a `Format` stores a matrix as a `Weight`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models.weights.format import Format


class Stored(ABC):
    """A parameter in the storage of its format: a pytree of arrays."""

    @property
    @abstractmethod
    def format(self) -> "Format":
        """The format that the parameter is stored in."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @abstractmethod
    def unit(self, axis: int) -> int:
        """Returns the parameter's unit along an axis, see `unit`."""

    @abstractmethod
    def take(self, places: Sequence[slice], axis: int) -> "Stored":
        """Takes a device's part of the parameter, see `take`."""

    def divides(self, places: Sequence[slice], axis: int) -> bool:
        """True if `take` can take these slices. Arrays may be abstract."""
        size = self.unit(axis)
        return not any(place.start % size or place.stop % size for place in places)


class Weight(Stored):
    """A matrix [m, k].

    Each array has shape [m / r, k / c, ...], where r and c are that array's unit sizes
    in rows and columns. A device's part of a weight is therefore a slice of each array.
    An array that lacks one of the two axes is the same in every part along that axis.
    """

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

    def gathered(self, ids: jax.Array) -> "Weight":
        """Returns the matrix of the rows with ids [n] int32, in the same storage."""
        assert self.unit(0) == 1, "an element of its arrays is in several rows"
        return jax.tree.map(lambda array: array[ids], self)

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        """Returns why the compiled kernel cannot compute this product. None if it
        can."""
        return f"there is no kernel for {self.format.name}"

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        """Computes products with the matrices of several experts, for a weight whose
        arrays have a leading axis of E experts.

        Args:
          rows: [n, k] of any float dtype.
          chosen: [n * r] int32, see `linear.expert_product`.
          native: True to use the compiled CPU kernel on a CPU. Only allowed if
            `chosen_unsupported` returns None for these arguments.

        Returns:
          [n * r, m] float32.
        """
        raise NotImplementedError(f"{self.format.name} cannot store experts")

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        """Returns why the compiled kernel cannot compute `chosen_product`. None if it
        can."""
        return f"there is no kernel for experts in {self.format.name}"

    def matrix(self) -> jax.Array:
        """Returns the matrix [m, k] in float32."""
        return self.rows(jnp.arange(self.shape[0]))

    def unit(self, axis: int) -> int:
        return _unit(self, axis)

    def take(self, places: Sequence[slice], axis: int) -> "Weight":
        return _taken(self, places, axis)


def unit(weight: Any, axis: int) -> int:
    """Returns the unit of a weight along an axis: the number of consecutive rows (axis
    0) or columns (axis 1) that one element of an array stands for. Works for plain
    arrays of any rank, too.
    """
    return weight.unit(axis) if isinstance(weight, Stored) else _unit(weight, axis)


def _unit(weight: Any, axis: int) -> int:
    arrays = [x for x in jax.tree.leaves(weight) if x.ndim > axis]
    return max(weight.shape[axis] // x.shape[axis] for x in arrays)


def take(weight: Any, places: Sequence[slice], axis: int) -> Any:
    """Takes a device's part of a weight or of any other parameter.

    Args:
      weight: a parameter of NumPy or JAX arrays.
      places: slices along the axis, in whole units (see `unit`).
      axis: the axis that devices divide.

    Raises:
      ValueError: a slice begins or ends inside a unit.
    """
    if isinstance(weight, Stored):
        return weight.take(places, axis)
    return _taken(weight, places, axis)


def _taken(weight: Any, places: Sequence[slice], axis: int) -> Any:
    def taken(array: Any) -> Any:
        if array.ndim <= axis:
            return array
        return slices(array, places, axis, weight.shape[axis] // array.shape[axis])

    return jax.tree.map(taken, weight)


def slices(array: Any, places: Sequence[slice], axis: int, size: int) -> Any:
    """Takes slices along an axis of an array whose elements stand for `size` rows or
    columns each."""
    if any(place.start % size or place.stop % size for place in places):
        raise ValueError(f"weight: cannot split units of {size} along axis {axis}")
    before = (slice(None),) * axis
    pieces = [
        array[(*before, slice(place.start // size, place.stop // size))]
        for place in places
    ]
    return joined(pieces, axis)


def joined(pieces: Sequence[Any], axis: int) -> Any:
    """Concatenates arrays along an axis: on the host if they are NumPy arrays."""
    if len(pieces) == 1:
        return pieces[0]
    library: Any = np if isinstance(pieces[0], np.ndarray) else jnp
    return library.concatenate(pieces, axis=axis)
