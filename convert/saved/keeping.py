"""Finds from headers which matrices of a checkpoint a model can keep quantized."""

import math
from collections.abc import Sequence
from typing import Any

from stree_jax.convert.families.tensor_map import Names, Row, source_shapes
from stree_jax.convert.families.tensors import (
    dtype_in_file,
    expert_sources,
    packed_orders,
    rows_of,
)
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.models import ModelConfig, param_shapes
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.format import Layout, Part
from stree_jax.models.weights.kept_format import KEPT
from stree_jax.models.weights.panels import KINDS


def layout_of(source: Tensors, names: Names, config: ModelConfig) -> Layout:
    """Returns the storage of a checkpoint's matrices in dtype "kept", from headers
    only.

    Matrices whose tensors are missing or have other shapes are omitted;
    `tensors.check_tensors` reports them. An order of columns that is stored as numbers
    is not seen.
    """
    shapes = param_shapes(config)
    matrices = [
        (row, shapes[row.path])
        for row in rows_of(names, config)
        if param_at(config, row.path).quantizable
    ]
    return tuple(
        (row.path, _parts(source, row, shape))
        for row, shape in matrices
        if _is_whole(source, row, shape)
    )


def _is_whole(source: Tensors, row: Row, shape: tuple[int, ...]) -> bool:
    """True if the row's tensors exist and have the shapes for a parameter."""
    found = [source.tensors.get(name) for name in row.sources]
    wanted = source_shapes(row, shape)
    return [info and info.shape for info in found] == wanted


def _parts(source: Tensors, row: Row, shape: tuple[int, ...]) -> tuple[Part, ...]:
    orders: Sequence[tuple[str, Any]] | None
    if len(shape) == 3:
        experts = expert_sources(source, row, KEPT)
        each = shape[1] // len(experts or "1")
        found = [(names[0], range(each)) for names in experts or ()]
        orders = found or None
    else:
        orders = packed_orders(source, row, KEPT)
    if orders is None:
        dtype = KEPT.source_dtype(dtype_in_file(source, row), shape)
        return (Part(dtype.name, shape[-2]),)
    by_columns = bool(row.groups) and row.group_axis == 1
    parts: list[Part] = []
    for name, order in orders:
        factor = source.has_factor(name)
        part = Part(str(source.scheme(name)), len(order), by_columns, factor)
        if parts and parts[-1].kind == part.kind:
            part = part._replace(rows=parts.pop().rows + part.rows)
        parts.append(part)
    return tuple(parts)


def note_of_dequantized(
    source: Tensors, rows: Sequence[Row], config: ModelConfig, layout: Layout
) -> str | None:
    """Returns one line about the quantized matrices that a kept model stores as
    bfloat16 arrays, or None if there are none."""
    parts, shapes = dict(layout), param_shapes(config)
    schemes, count, size = set[str](), 0, 0
    for row in rows:
        found = {source.scheme(name) for name in row.sources} - {None}
        if found and not any(part.kind in KINDS for part in parts.get(row.path, ())):
            schemes |= set(filter(None, found))
            count += 1
            size += 2 * math.prod(shapes[row.path])
    if not count:
        return None
    what = "matrix" if count == 1 else "matrices"
    return (
        f"{source.directory}: {count} {what} of {'+'.join(sorted(schemes))} cannot be "
        f"kept; in bfloat16 they take {size / 1e6:,.1f} MB"
    )
