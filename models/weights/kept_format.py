"""The format that keeps quantized matrices as they are in their file. `weights.kept`
has the matrices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from stree_jax.cpu_kernels import available
from stree_jax.models.weights.format import (
    BFLOAT16,
    FLOAT32,
    QUANTIZED,
    Format,
    Layout,
    Packed,
    Part,
)
from stree_jax.models.weights.panels import KINDS

# A bfloat16 matrix up to this size in float32 becomes float32, so that products do not
# round their input rows to bfloat16. Larger ones stay bfloat16, to save memory.
MAX_WIDENED_BYTES = 2**26


@dataclass(frozen=True)
class KeptFormat(Format):
    """The weight format that keeps a file's quantized matrices as they are.

    Attributes:
      layout: storage of the matrices of one file, by path. `abstract` assumes that
        matrices of other paths are float32.
      planes: number of int8 planes to which a product rounds its input rows: with 2
        they have 16 bits, with 1 they have 8 bits.
    """

    name: str = "kept"
    dtype: np.dtype = FLOAT32
    planes: int = 2
    keeps_columns: ClassVar[bool] = True
    can_be_saved: ClassVar[bool] = True

    @cached_property
    def _parts(self) -> dict[tuple[str, ...], tuple[Part, ...]]:
        return dict(self.layout)

    def store(self, matrix: Any, columns: int | None = None) -> Any:
        from stree_jax.models.weights.kept import stored_whole

        return stored_whole(matrix, self.planes)

    def source_dtype(self, stored: str, shape: Sequence[int]) -> np.dtype:
        large = math.prod(shape) * FLOAT32.itemsize > MAX_WIDENED_BYTES
        narrow = stored == QUANTIZED or (stored == BFLOAT16.name and large)
        return BFLOAT16 if narrow else FLOAT32

    def keeps(self, scheme: str, shape: Sequence[int]) -> bool:
        return scheme in KINDS and KINDS[scheme].keeps(shape)

    def keep(self, blocks: Sequence[Packed], experts: int | None = None) -> Any:
        from stree_jax.models.weights.kept import stored_panels

        return stored_panels(blocks, experts, self.planes)

    def parts(self, shape: tuple[int, ...], path: tuple[str, ...]) -> tuple[Part, ...]:
        """Returns the storage of a parameter [m, k], or of each expert's [E, m, k]."""
        return self._parts.get(path, (Part(FLOAT32.name, shape[-2]),))

    def abstract(self, shape: tuple[int, ...], path: tuple[str, ...] = ()) -> Any:
        from stree_jax.models.weights.kept import abstract_weight

        return abstract_weight(self.parts(shape, path), shape, self.planes)

    def nbytes(self, shape: tuple[int, ...], path: tuple[str, ...] = ()) -> int:
        *experts, _, k = shape
        arrays = (arrays_of(part, k) for part in self.parts(shape, path))
        found = (array for each in arrays for array in each.values())
        one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in found)
        return math.prod(experts) * one

    def adopt(self, weight: Any) -> Any:
        from stree_jax.models.weights.kept import with_planes

        known = isinstance(weight.format, KeptFormat)
        return with_planes(weight, self.planes) if known else None

    def fitted(self, layout: Callable[[], Layout]) -> "KeptFormat | None":
        found = layout()
        return replace(self, layout=found) if kept_kinds(found) else None

    def with_params(self, params: Mapping[tuple[str, ...], Any]) -> "KeptFormat":
        from stree_jax.models.weights.kept import layout_of

        return replace(self, layout=layout_of(params))

    def for_drafters(self) -> str:
        return KEPT_INT8.name

    def storage(self, params: Any) -> str:
        """Returns, for example, "kept (q4_k+q6_k, 4.9 bits a weight)"."""
        from stree_jax.models.weights.kept import described

        return f"{self} ({described(params)})"


KEPT = KeptFormat()
KEPT_INT8 = KeptFormat("kept-int8", planes=1)


def runs_compiled() -> bool:
    """True if compiled kernels compute products of kept weights here."""
    return available()


def kept_kinds(layout: Layout) -> set[str]:
    """Returns the kinds of panels in a layout."""
    return {part.kind for _, parts in layout for part in parts} & KINDS.keys()


def arrays_of(part: Part, k: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns the shape and dtype of the arrays of a part with k columns, by name:
    "array" of a plain one; "panels", and "columns" and "factor" if it has them."""
    if part.kind not in KINDS:
        return {"array": ((part.rows, k), np.dtype(part.kind))}
    panels = KINDS[part.kind].panel_shape(part.rows, k)
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    found["panels"] = (panels, np.dtype(np.uint8))
    if part.columns:
        found["columns"] = ((k,), np.dtype(np.int32))
    if part.factor:
        found["factor"] = ((part.rows,), FLOAT32)
    return found
