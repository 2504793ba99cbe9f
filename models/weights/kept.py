"""A weight format that keeps quantized matrices as they are in their file.

Matrices are stored in panels (`weights.panels`). A product rounds its input rows to 16
bits, which changes logits by about 1e-4 of the largest at most, or to 8 bits. CPU
kernels compute it if they are available, with equal results on every CPU, bit for bit.
All other parameters, caches and records are float32. Matrices that cannot be kept are
plain arrays: quantized ones are bfloat16, others float32, or bfloat16 if they are
stored in it and large.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.cpu_kernels import (
    by_platform,
    cpu_kernel,
    experts_unsupported,
    floats,
    panels_unsupported,
)
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.experts import Experts, abstract_experts, chosen_rows
from stree_jax.models.weights.format import BFLOAT16, FLOAT32, Layout, Packed, Part
from stree_jax.models.weights.kept_format import KEPT, KEPT_INT8, KeptFormat, arrays_of
from stree_jax.models.weights.panels import KINDS, PanelKind
from stree_jax.models.weights.panels.gpu import gpu_product
from stree_jax.models.weights.panels.kind import LANES
from stree_jax.models.weights.panels.product import panel_product
from stree_jax.models.weights.plain import PlainWeight, in_float32
from stree_jax.models.weights.stack import Stack
from stree_jax.models.weights.weight import Stored, Weight, slices

_FORMATS = {format.planes: format for format in (KEPT, KEPT_INT8)}


def stored_whole(matrix: Any, planes: int) -> Stored:
    """Stores a matrix [m, k], or those of experts [E, m, k], as a plain array."""
    dtype = BFLOAT16 if matrix.dtype == BFLOAT16 else FLOAT32
    whole = Whole(matrix.astype(dtype, copy=False), planes)
    return whole if matrix.ndim == 2 else Experts(whole)


def stored_panels(blocks: Sequence[Packed], experts: int | None, planes: int) -> Stored:
    """Stacks quantized matrices to a weight; see `Format.keep`."""
    joined = _joined(blocks, experts)
    parts = tuple(_panels(packed, experts, planes) for packed in joined)
    weight = parts[0] if len(parts) == 1 else Stack(parts)
    return weight if experts is None else Experts(weight)


def abstract_weight(
    parts: Sequence[Part], shape: tuple[int, ...], planes: int
) -> Stored:
    """Returns a parameter of this storage with `jax.ShapeDtypeStruct`s instead of
    arrays."""
    *experts, _, k = shape
    weights = [_abstract(part, k, planes) for part in parts]
    weight = weights[0] if len(weights) == 1 else Stack(tuple(weights))
    return abstract_experts(weight, *experts) if experts else weight


def _abstract(part: Part, k: int, planes: int) -> Weight:
    arrays = {n: jax.ShapeDtypeStruct(*each) for n, each in arrays_of(part, k).items()}
    if part.kind not in KINDS:
        return Whole(**arrays, planes=planes)
    padding = -part.rows % LANES
    return Panels(**arrays, kind=part.kind, padding=padding, planes=planes)


def with_planes(weight: Any, planes: int) -> Any:
    """Returns a weight of a `KeptFormat` with other `planes`."""
    if isinstance(weight, Experts):
        return Experts(with_planes(weight.stack, planes))
    if isinstance(weight, Stack):
        return Stack(tuple(with_planes(part, planes) for part in weight.parts))
    assert isinstance(weight, Panels | Whole)
    return replace(weight, planes=planes)


def layout_of(params: Mapping[tuple[str, ...], Any]) -> Layout:
    """Returns the storage of a model's weights, by path."""
    weights = ((path, x) for path, x in params.items() if isinstance(x, Stored))
    return tuple((path, parts_of(x)) for path, x in weights)


def described(params: Any) -> str:
    """Returns what a model's weights consist of, such as "q4_k, 4.9 bits a weight"."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Stored))
    weights = [leaf for leaf in leaves if isinstance(leaf, Stored)]
    kinds = {part.kind for weight in weights for part in parts_of(weight)}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
    count = sum(math.prod(weight.shape) for weight in weights)
    named = "+".join(sorted(kinds & KINDS.keys())) or "nothing quantized"
    return f"{named}, {8 * size / max(count, 1):.1f} bits a weight"


def _panels(packed: Packed, experts: int | None, planes: int) -> "Panels":
    kind, rows = KINDS[packed.scheme], packed.shape[0]
    columns, factor = (packed.arrays.get(name) for name in ("columns", "factor"))
    m = rows if experts is None else rows // experts
    padding = -m % LANES
    if experts is None:
        panels = kind.pack(packed.by_row, packed.reusable)
    else:
        panels = _packed_experts(kind, packed.by_row, experts, m)
        factor = None if factor is None else factor.reshape(experts, m)
    return Panels(panels, columns, factor, kind.name, padding, planes)


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
    """Stacks consecutive matrices of one scheme whose columns are in the same order.

    With `experts`, stacks the matrices of each expert, see `Format.keep`.
    """
    joined: list[Packed] = []
    for packed in blocks:
        before = joined[-1] if joined else None
        if before is None or not before.fits(packed):
            joined.append(packed)
        else:
            joined[-1] = before.stacked(packed, experts or 1)
    return joined


def parts_of(weight: Stored) -> tuple[Part, ...]:
    """Returns the storage of a weight of a `KeptFormat`, or of each expert's."""
    if isinstance(weight, Experts):
        return parts_of(weight.one)
    if isinstance(weight, Stack):
        return tuple(part for each in weight.parts for part in parts_of(each))
    if isinstance(weight, Panels):
        columns, factor = (x is not None for x in (weight.columns, weight.factor))
        return (Part(weight.kind, weight.shape[0], columns, factor),)
    assert isinstance(weight, Whole)
    return (Part(np.dtype(weight.array.dtype).name, weight.shape[0]),)


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
            factor = slices(factor, places, 0, 1)
        panels = slices(self.panels, places, axis, self.unit(axis))
        return replace(self, panels=panels, factor=factor)

    def divides(self, places: Sequence[slice], axis: int) -> bool:
        fixed = self.columns is not None if axis else self.padding > 0
        return not fixed and super().divides(places, axis)

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return _product.unsupported(rows, self.panels, valid_count, **self._options())

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T with the rows rounded to integers of 8 or 16
        bits."""
        if self.columns is not None:
            rows = rows[:, self.columns]
        definition = _product.definition
        cpu, cuda, default = (
            partial(function, **self._options())
            for function in (_product if native else definition, _on_gpu, definition)
        )
        args = rows, self.panels, valid_count
        y = by_platform(*args, cpu=cpu, cuda=cuda, default=default)
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
        y = compute(rows, chosen, jnp.asarray(self.panels), **self._options())
        return y if self.factor is None else y * self.factor[chosen]

    def rows(self, ids: jax.Array) -> jax.Array:
        m = self.shape[0]
        where = jnp.clip(jnp.where(ids < 0, ids + m, ids), 0, m - 1)
        found = _rows(jnp.asarray(self.panels), where, kind=self.kind)
        if self.factor is not None:
            found = found * self.factor[where][..., None]
        return found if self.columns is None else self._in_order(found)

    def gathered(self, ids: jax.Array) -> "Panels":
        panels = self.of.gathered(jnp.asarray(self.panels), ids)
        factor = None if self.factor is None else self.factor[ids]
        padding = -len(ids) % LANES
        return replace(self, panels=panels, factor=factor, padding=padding)

    def _in_order(self, rows: jax.Array) -> jax.Array:
        assert self.columns is not None
        return rows[..., jnp.argsort(self.columns)]


register_for_export(Panels)


@cpu_kernel(
    "stree_panel_rows",
    outputs=lambda panels, ids, kind: floats(
        *ids.shape, panels.shape[1] * KINDS[kind].tile
    ),
    unsupported=lambda panels, ids, **_: not panels.size,
    shared=("panels",),
    attributes=lambda kind: {"kind": KINDS[kind].number},
)
def _rows(panels: jax.Array, ids: jax.Array, *, kind: str) -> jax.Array:
    """Looks up rows [.., k] float32, for ids [..] int32 from 0 to 16 P - 1."""
    some = panels[ids // LANES]
    decoded = KINDS[kind].decode(some.reshape(-1, *some.shape[-2:])).matrix()
    lane = (ids % LANES).reshape(-1, 1, 1)
    found = jnp.take_along_axis(decoded, lane, axis=1)[:, 0]
    return found.reshape(*ids.shape, -1)


def _attributes(kind: str, planes: int, **_: Any) -> dict[str, Any]:
    return {"kind": KINDS[kind].number, "planes": planes}


def _prepared(*arrays: Any, **_: Any) -> tuple[Any, ...]:
    return in_float32(*arrays)


@cpu_kernel(
    "stree_panels",
    outputs=lambda rows, panels, _, kind, planes, padding: floats(
        rows.shape[0], panels.shape[0] * LANES - padding
    ),
    unsupported=lambda rows, panels, count, **_: panels_unsupported(
        rows, panels, count
    ),
    shared=("panels",),
    attributes=_attributes,
    prepare=_prepared,
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


def _on_gpu(
    rows: jax.Array,
    panels: jax.Array,
    _: jax.Array | None,
    *,
    kind: str,
    planes: int,
    padding: int,
) -> jax.Array:
    y = gpu_product(rows.astype(jnp.float32), panels, KINDS[kind], planes)
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
    attributes=_attributes,
    prepare=_prepared,
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
class Whole(PlainWeight):
    """An unquantized matrix of a `KeptFormat`, stored as a plain array. A model in this
    format has quantized matrices (`Panels`), and those that cannot be kept quantized.

    Attributes:
      array: [m, k] float32 or bfloat16.
      planes: see `KeptFormat`.
    """

    planes: int = struct.field(pytree_node=False, default=2)

    @property
    def format(self) -> KeptFormat:
        return _FORMATS[self.planes]


register_for_export(Whole)
