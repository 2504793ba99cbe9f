"""The interface of weight formats: `Format` stores matrices as `Weight`s."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
QUANTIZED = "quantized"  # in place of a dtype, see `Format.source_dtype`


class Part(NamedTuple):
    """The storage of consecutive rows of a matrix.

    Attributes:
      kind: a key of `panels.KINDS`, or the dtype of a plain array.
      rows: number of rows, for experts those of one expert.
      columns: True if the columns have an order of their own.
      factor: True if the rows have factors.
    """

    kind: str
    rows: int
    columns: bool = False
    factor: bool = False


Layout = tuple[tuple[tuple[str, ...], tuple[Part, ...]], ...]


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


@dataclass(frozen=True)
class Packed:
    """A quantized matrix in the layout of a checkpoint.

    Attributes:
      scheme: name of the layout, such as "nvfp4" or "q4_k".
      shape: [m, k].
      arrays: the stored arrays by name, such as "weight" and "scale". The first axis of
        each is the matrix's rows, except of "columns" [k] int32: if it is there, column
        j of the stored matrix is column columns[j] of the matrix. "factor" [m] float32,
        if it is there, multiplies the rows of the matrix.
      reusable: True if the memory of the arrays may be overwritten by `Format.keep`.
    """

    scheme: str
    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]
    reusable: bool = False

    @property
    def by_row(self) -> dict[str, np.ndarray]:
        """The arrays that hold the numbers of the rows."""
        others = ("columns", "factor")
        return {name: a for name, a in self.arrays.items() if name not in others}

    def in_order(self, rows: np.ndarray) -> "Packed":
        """Returns the matrix with rows `rows`, in that order."""
        if np.array_equal(rows, np.arange(self.shape[0])):
            return self
        arrays = {n: a if n == "columns" else a[rows] for n, a in self.arrays.items()}
        return replace(self, shape=(len(rows), *self.shape[1:]), arrays=arrays)

    def with_columns(self, columns: np.ndarray) -> "Packed":
        """Returns the matrix whose column j is column columns[j] of this one."""
        back = np.argsort(columns).astype(np.int32)
        stored = self.arrays.get("columns")
        back = back if stored is None else back[stored]
        return replace(self, arrays={**self.arrays, "columns": back})

    def fits(self, other: "Packed") -> bool:
        """True if another matrix of the same layout can be stacked below this one."""
        if self.scheme != other.scheme or self.arrays.keys() != other.arrays.keys():
            return False
        columns = self.arrays.get("columns")
        return columns is None or np.array_equal(columns, other.arrays["columns"])

    def stacked(self, other: "Packed", experts: int = 1) -> "Packed":
        """Returns the matrix with another one, that `fits`, below it.

        If both consist of matrices of several experts, stacks the two matrices of each
        expert.
        """

        def joined(name: str, a: np.ndarray) -> np.ndarray:
            if name == "columns":
                return a
            parts = (
                z.reshape(experts, -1, *a.shape[1:]) for z in (a, other.arrays[name])
            )
            return np.concatenate(list(parts), axis=1).reshape(-1, *a.shape[1:])

        arrays = {name: joined(name, a) for name, a in self.arrays.items()}
        shape = (self.shape[0] + other.shape[0], *self.shape[1:])
        return replace(self, shape=shape, arrays=arrays)


def flat_experts(matrices: Sequence[Packed]) -> Packed:
    """Returns the quantized matrices of experts as one matrix [E m, k].

    Args:
      matrices: one [E, m, k], or E matrices [m, k] of one layout.
    """
    first = matrices[0]
    names = first.arrays if len(matrices) > 1 else ()
    arrays = {n: np.concatenate([z.arrays[n] for z in matrices]) for n in names}
    shape = len(matrices) * math.prod(first.shape[:-1]), first.shape[-1]
    return replace(first, shape=shape, arrays=arrays or first.arrays)


@dataclass(frozen=True)
class Format(ABC):
    """A storage format of a model's weight matrices.

    It applies to the matrices that only products and row lookups read. A format is
    hashable and compares by value; `dtype=` arguments accept its name.

    Attributes:
      name: name of the format.
      dtype: dtype of KV caches, records, and all other parameters.
      layout: path and storage of the matrices of one model, for formats whose storage
        differs between matrices. Otherwise empty.
      plain: True if the matrices are plain arrays of `dtype`.
      can_be_saved: True if models in this format can be saved. Other formats than plain
        ones are saved as one safetensors file with the arrays of every weight.
      keeps_columns: True if `keep` supports matrices with "columns", see `Packed`.
    """

    name: str
    dtype: np.dtype
    layout: Layout = ()
    plain: ClassVar[bool] = False
    can_be_saved: ClassVar[bool] = False
    keeps_columns: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def store(self, matrix: Any, columns: int | None = None) -> Any:
        """Stores a matrix as a weight, or the matrices of experts as `Experts`.

        Args:
          matrix: [m, k] or [E, m, k] of any float dtype.
          columns: number of columns of the whole matrix, if `matrix` is only a part of
            it, divided between units. The result is then that part of the whole weight.
            If None, the matrix is whole.
        """

    def source_dtype(self, stored: str, shape: Sequence[int]) -> np.dtype:
        """Returns the dtype in which `store` receives a matrix.

        Args:
          stored: the dtype in the checkpoint, or "quantized".
          shape: shape of the matrix.
        """
        return BFLOAT16 if stored == BFLOAT16.name else FLOAT32

    def keeps(self, scheme: str, shape: Sequence[int]) -> bool:
        """True if `keep` supports matrices [m, k] of a quantization scheme."""
        return False

    def keep(self, blocks: Sequence[Packed], experts: int | None = None) -> Stored:
        """Stacks quantized matrices by rows to a weight, without changing their values.

        Args:
          blocks: the matrices.
          experts: E, if each of `blocks` [E m_i, k] consists of matrices [m_i, k] of E
            experts. The result is then `Experts`, each with the stacked matrices of one
            expert.

        Raises:
          NotImplementedError: the format supports no quantization scheme.
        """
        raise NotImplementedError(f"{self.name} cannot keep quantized matrices")

    def adopt(self, weight: Stored) -> Stored | None:
        """Returns a stored weight in this format, with the same numbers. None if it has
        to be dequantized for that."""
        return weight if weight.format == self else None

    def fitted(self, layout: Callable[[], Layout]) -> "Format | None":
        """Returns the format for the matrices of one file.

        Args:
          layout: returns the storage of the matrices that keeps quantized ones as they
            are in the file. Formats whose storage is always the same do not call it.

        Returns:
          The format. None if the format is meant for quantized matrices, and none of
          them can be kept.
        """
        return self

    def with_params(self, params: Mapping[tuple[str, ...], Any]) -> "Format":
        """Returns the format with the layout of a model's parameters, by path."""
        return self

    def for_drafters(self) -> str | None:
        """Returns the name of the format in which drafters are loaded by default for a
        target in this format. If None, it is that of the `dtype` argument."""
        return None

    def storage(self, params: Any) -> str:
        """Returns the name of the format, with what the matrices of a model consist of
        if that differs between models. Arrays may be abstract."""
        return self.name

    def abstract(self, shape: tuple[int, ...], path: tuple[str, ...] = ()) -> Any:
        """Returns a parameter with `jax.ShapeDtypeStruct`s instead of arrays.

        Args:
          shape: shape [m, k] or [E, m, k].
          path: path of the parameter, for formats in which the storage depends on it.
        """
        return _abstract(self, shape)


@cache
def _abstract(format: Format, shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(format.store, jax.ShapeDtypeStruct(shape, jnp.float32))


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
