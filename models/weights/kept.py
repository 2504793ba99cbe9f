"""Weights that stay as they are in a file, in 4 to 8 bits per number.

Matrices are stored in panels (`weights.panels`). A product rounds its input rows to 16
bits, which changes logits by less than 1e-4 of the largest, or to 8 bits. CPU kernels
compute it if they are available, with the same bits on every CPU. All other parameters,
caches and records are float32. Matrices that cannot be kept are plain arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.cpu_kernels import (
    cpu_kernel,
    experts_unsupported,
    floats,
    panels_unsupported,
)
from stree_jax.models.serialization import register_for_export
from stree_jax.models.weights.experts import Experts, chosen_rows
from stree_jax.models.weights.panels import KINDS, PanelKind
from stree_jax.models.weights.panels.kind import LANES
from stree_jax.models.weights.panels.product import panel_product
from stree_jax.models.weights.plain import PlainWeight, in_float32
from stree_jax.models.weights.weight import (
    FLOAT32,
    Format,
    Packed,
    Stored,
    Weight,
    slices,
    take,
)


@dataclass(frozen=True)
class KeptFormat(Format):
    """The format with a file's quantized matrices as they are.

    Attributes:
      planes: int8 numbers per number of an input row: 2 rounds rows to 16 bits, 1 to 8.
    """

    name: str = "kept"
    dtype: np.dtype = FLOAT32
    planes: int = 2
    keeps_columns: ClassVar[bool] = True

    def store(self, matrix: Any, columns: int | None = None) -> Any:
        whole = Whole(matrix.astype(FLOAT32, copy=False), self.planes)
        return whole if matrix.ndim == 2 else Experts(whole)

    def source_dtype(self, stored: str) -> np.dtype:
        return FLOAT32

    def keeps(self, scheme: str, shape: Sequence[int]) -> bool:
        return scheme in KINDS and KINDS[scheme].keeps(shape)

    def keep(self, blocks: Sequence[Packed], experts: int | None = None) -> Stored:
        joined = _joined(blocks, experts)
        parts = tuple(self._panels(packed, experts) for packed in joined)
        weight = parts[0] if len(parts) == 1 else Stack(parts)
        return weight if experts is None else Experts(weight)

    def _panels(self, packed: Packed, experts: int | None) -> "Panels":
        kind, rows = KINDS[packed.scheme], packed.shape[0]
        columns, factor = (packed.arrays.get(name) for name in ("columns", "factor"))
        m = rows if experts is None else rows // experts
        padding = -m % LANES
        if experts is None:
            panels = kind.pack(packed.by_row)
        else:
            panels = _packed_experts(kind, packed.by_row, experts, m)
            factor = None if factor is None else factor.reshape(experts, m)
        return Panels(panels, columns, factor, kind.name, padding, self.planes)


KEPT = KeptFormat()
KEPT_INT8 = KeptFormat("kept-int8", planes=1)
_FORMATS = {format.planes: format for format in (KEPT, KEPT_INT8)}


def _packed_experts(
    kind: PanelKind, arrays: Mapping[str, np.ndarray], experts: int, m: int
) -> np.ndarray:
    """Rearranges matrices [E m, k] to panels [E, P, n, nbytes]."""
    if m % LANES == 0:
        panels = kind.pack(arrays)
        return panels.reshape(experts, -1, *panels.shape[1:])
    each = (
        kind.pack({name: a[e * m : (e + 1) * m] for name, a in arrays.items()})
        for e in range(experts)
    )
    return np.stack(list(each))


def _joined(blocks: Sequence[Packed], experts: int | None = None) -> list[Packed]:
    """Stacks consecutive matrices of one scheme, unless their columns have an order of
    their own.

    With `experts`, stacks the matrices of each expert, see `Format.keep`.
    """
    joined: list[Packed] = []
    for packed in blocks:
        before = joined[-1] if joined else None
        own = "columns" in packed.arrays
        if before is None or own or not before.fits(packed):
            joined.append(packed)
        else:
            joined[-1] = before.stacked(packed, experts or 1)
    return joined


@struct.dataclass
class Panels(Weight):
    """A matrix in panels of one kind.

    Attributes:
      panels: [P, n, nbytes] uint8, see `panels.kind`.
      columns: [k] int32. If not None, the product reads its input rows in this order.
      factor: [m] float32, factors of the rows of the matrix, or None.
      kind: name of the kind, a key of `KINDS`.
      padding: rows of the last panel that are not part of the matrix.
      planes: see `KeptFormat`.
    """

    panels: Any
    columns: Any = None
    factor: Any = None
    kind: str = struct.field(pytree_node=False, default="q4_0")
    padding: int = struct.field(pytree_node=False, default=0)
    planes: int = struct.field(pytree_node=False, default=2)

    @property
    def format(self) -> KeptFormat:
        return _FORMATS[self.planes]

    @property
    def of(self) -> PanelKind:
        """The kind of the panels."""
        return KINDS[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        count, tiles = self.panels.shape[:2]
        return count * LANES - self.padding, tiles * self.of.tile

    def unit(self, axis: int) -> int:
        return self.of.tile if axis else LANES

    def take(self, places: Sequence[slice], axis: int) -> "Panels":
        if axis == 0 and self.padding:
            raise ValueError(f"weight: {self.shape[0]} rows are not whole panels")
        if axis == 1 and self.columns is not None:
            raise ValueError("weight: cannot split columns with an order of their own")
        factor = self.factor
        if axis == 0 and factor is not None:
            factor = np.concatenate([factor[place] for place in places])
        panels = slices(self.panels, places, axis, self.unit(axis))
        return self.replace(panels=panels, factor=factor)  # type: ignore[attr-defined]

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return _product.unsupported(rows, self.panels, valid_count, **self._options())

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T with the rows rounded to integers of 8 or 16
        bits."""
        if self.columns is not None:
            rows = rows[:, self.columns]
        compute = _product if native else _product.definition
        y = compute(rows, self.panels, valid_count, **self._options())
        return y if self.factor is None else y * self.factor[None]

    def _options(self) -> dict[str, Any]:
        return {"kind": self.kind, "planes": self.planes, "padding": self.padding}

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        return _chosen.unsupported(rows, chosen, self.panels, **self._options())

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        if self.columns is not None:
            rows = rows[:, self.columns]
        compute = _chosen if native else _chosen.definition
        y = compute(rows, chosen, self.panels, **self._options())
        return y if self.factor is None else y * self.factor[chosen]

    def rows(self, ids: jax.Array) -> jax.Array:
        where = jnp.where(ids < 0, ids + self.shape[0], ids)
        some = self.panels[where // LANES]
        decoded = self.of.decode(some.reshape(-1, *some.shape[-2:])).matrix()
        lane = (where % LANES).reshape(-1, 1, 1)
        found = jnp.take_along_axis(decoded, lane, axis=1)[:, 0]
        found = found.reshape(*ids.shape, -1)
        if self.factor is not None:
            found = found * self.factor[where][..., None]
        return found if self.columns is None else self._in_order(found)

    def _in_order(self, rows: jax.Array) -> jax.Array:
        assert self.columns is not None
        return rows[..., jnp.argsort(self.columns)]


register_for_export(Panels)


@cpu_kernel(
    "stree_panels",
    outputs=lambda rows, panels, _, kind, planes, padding: floats(
        rows.shape[0], panels.shape[0] * LANES - padding
    ),
    unsupported=lambda rows, panels, count, **_: panels_unsupported(
        rows, panels, count
    ),
    shared=("panels",),
    attributes=lambda kind, planes, **_: {
        "kind": KINDS[kind].number,
        "planes": planes,
    },
    prepare=lambda rows, *rest, **_: in_float32(rows, *rest),
)
def _product(
    rows: jax.Array,
    panels: jax.Array,
    valid_count: jax.Array | None,
    *,
    kind: str,
    planes: int,
    padding: int,
) -> jax.Array:
    """Computes rows [t, k] @ matrix.T, see `panel_product`."""
    y = panel_product(rows.astype(jnp.float32), panels, KINDS[kind], planes)
    return y[:, : y.shape[1] - padding]


@cpu_kernel(
    "stree_experts_panels",
    outputs=lambda rows, chosen, panels, kind, planes, padding: floats(
        chosen.shape[0], panels.shape[1] * LANES - padding
    ),
    unsupported=lambda rows, chosen, panels, **_: experts_unsupported(
        rows, chosen, panels
    ),
    shared=("panels",),
    attributes=lambda kind, planes, **_: {
        "kind": KINDS[kind].number,
        "planes": planes,
    },
    prepare=lambda rows, *rest, **_: in_float32(rows, *rest),
)
def _chosen(
    rows: jax.Array,
    chosen: jax.Array,
    panels: jax.Array,
    *,
    kind: str,
    planes: int,
    padding: int,
) -> jax.Array:
    """Computes products with the chosen matrices of panels [E, P, n, nbytes]."""
    weight = Panels(panels, None, None, kind, padding, planes)

    def product(rows: jax.Array, expert: Panels) -> jax.Array:
        return expert.product(rows, None, native=False)

    return chosen_rows(rows, chosen, weight, product)


@struct.dataclass
class Whole(Weight):
    """A matrix that is a plain array in a model that keeps the others.

    Attributes:
      array: [m, k] float32.
      planes: see `KeptFormat`.
    """

    array: Any
    planes: int = struct.field(pytree_node=False, default=2)

    @property
    def format(self) -> KeptFormat:
        return _FORMATS[self.planes]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return PlainWeight(self.array).unsupported(rows, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        return PlainWeight(self.array).product(rows, valid_count, native)

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        return PlainWeight(self.array).chosen_unsupported(rows, chosen)

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        return PlainWeight(self.array).chosen_product(rows, chosen, native)

    def rows(self, ids: jax.Array) -> jax.Array:
        return PlainWeight(self.array).rows(ids)


register_for_export(Whole)


@struct.dataclass
class Stack(Weight):
    """Matrices of several kinds, stacked by rows.

    Attributes:
      parts: weights [m_i, k].
    """

    parts: tuple[Weight, ...]

    @property
    def format(self) -> Format:
        return self.parts[0].format

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def unit(self, axis: int) -> int:
        return max(part.unit(axis) for part in self.parts)

    def take(self, places: Sequence[slice], axis: int) -> "Stack":
        if axis:
            return Stack(tuple(part.take(places, axis) for part in self.parts))
        parts, begin = [], 0
        for part in self.parts:
            end = begin + part.shape[0]
            own = [
                slice(max(p.start, begin) - begin, min(p.stop, end) - begin)
                for p in places
                if max(p.start, begin) < min(p.stop, end)
            ]
            parts.append(take(part, own, axis))
            begin = end
        return Stack(tuple(parts))

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        reasons = (part.unsupported(rows, valid_count) for part in self.parts)
        return next(filter(None, reasons), None)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        each = [part.product(rows, valid_count, native) for part in self.parts]
        return jnp.concatenate(each, axis=1)

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        reasons = (part.chosen_unsupported(rows, chosen) for part in self.parts)
        return next(filter(None, reasons), None)

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        each = [part.chosen_product(rows, chosen, native) for part in self.parts]
        return jnp.concatenate(each, axis=1)

    def rows(self, ids: jax.Array) -> jax.Array:
        where = jnp.where(ids < 0, ids + self.shape[0], ids)
        found, begin = jnp.zeros((*ids.shape, self.shape[1]), jnp.float32), 0
        for part in self.parts:
            own = jnp.clip(where - begin, 0, part.shape[0] - 1)
            inside = (where >= begin) & (where < begin + part.shape[0])
            found = jnp.where(inside[..., None], part.rows(own), found)
            begin += part.shape[0]
        return found


register_for_export(Stack)
