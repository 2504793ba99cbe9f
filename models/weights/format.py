"""The interface of weight formats, without the weights: names, dtypes and bytes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

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

    def keep(self, blocks: Sequence[Packed], experts: int | None = None) -> Any:
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

    def adopt(self, weight: Any) -> Any:
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

    def nbytes(self, shape: tuple[int, ...], path: tuple[str, ...] = ()) -> int:
        """Counts the bytes of a parameter; arguments as in `abstract`."""
        import jax

        leaves = jax.tree.leaves(self.abstract(shape, path))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@cache
def _abstract(format: Format, shape: tuple[int, ...]) -> Any:
    import jax

    return jax.eval_shape(format.store, jax.ShapeDtypeStruct(shape, np.float32))
