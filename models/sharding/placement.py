"""Places parameters on the devices of a mesh, each device with its own part.

The array of a divided parameter consists of the devices' parts, one after another along
the divided axis. `parts_in_order` and `whole_from` convert between that layout and the
order on one device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.models.base.shards import (
    MODEL,
    VOCAB,
    WHOLE,
    Cut,
    Names,
    part_slices,
    part_width,
    run_width,
)
from stree_jax.models.configs.params import Param, Params, Path, nest
from stree_jax.models.layers.params import by_path
from stree_jax.models.sharding.parts import cut_at, cut_of, part_config
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.stack.param_table import param_shapes
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.weight import Stored, joined, take, unit

Slices = tuple[slice, ...]
Make = Callable[[int], Any]  # returns part i of a parameter, a pytree of host arrays


def axis_size(mesh: Mesh | AbstractMesh, axes: Names) -> int:
    """Returns the number of devices along mesh axes; 1 along axes that the mesh does
    not have."""
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape.get(name, 1) for name in names)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes of type Auto, which this library's `jax.shard_map`
    calls need. The default of `jax.make_mesh` is Explicit."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def cut_for(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    dtype: Any,
    whole: bool = False,
    axes: Cut = WHOLE,
) -> Cut:
    """Returns how the devices of a mesh divide a model.

    Args:
      config: the architecture.
      mesh: the mesh.
      dtype: dtype or format of the weights.
      whole: True if every device has the whole model.
      axes: the names of the mesh axes.

    Raises:
      ValueError: the mesh has other axes; no part of the model divides by the size of
        its axis; or the weight format does not allow the division.
    """
    rows = (axes.rows,) if isinstance(axes.rows, str) else axes.rows
    if unknown := set(mesh.axis_names) - {*rows, axes.axis}:
        raise ValueError(
            f"mesh: unknown axis {min(map(str, unknown))!r}; want "
            f"{' and '.join(map(repr, rows))} (rows of a batch) and {axes.axis!r} "
            "(parts of a model), or name other axes with rows= and parts="
        )
    if whole:
        return axes
    n = axis_size(mesh, axes.axis)
    cut = cut_of(config, n)
    if n > 1 and cut == WHOLE:
        works = ", ".join(str(k) for k in range(2, 65) if cut_of(config, k) != WHOLE)
        raise ValueError(
            f"mesh: no layer of this model divides by {axes.axis}={n}; "
            f"these sizes work: {works or 'only 1'}"
        )
    format = format_named(dtype)
    for path, shape in param_shapes(config).items():
        param, parts = cut_at(config, cut, path)
        if param is not None and param.quantizable and parts > 1:
            _check_units(path, shape, param, parts, format)
    return replace(axes, parts=cut.parts)


def _check_units(
    path: Path, shape: tuple[int, ...], param: Param, parts: int, format: Format
) -> None:
    """Raises ValueError if the division would split a unit of a weight; see `unit`."""
    weight = format.abstract(shape, path)
    runs = (part_indices(param, i, parts) for i in range(parts))
    if isinstance(weight, Stored) and not all(
        weight.divides(places, param.axis) for places in runs
    ):
        axis_name = ("rows", "columns")[param.axis - len(shape)]
        size = unit(weight, param.axis)
        raise ValueError(
            f"mesh: {'/'.join(path)}: {shape[param.axis]} {axis_name} in units of "
            f"{size} do not divide by {parts} devices in {format}; load in bfloat16, "
            "or use fewer devices"
        )


def spec_of(param: Param | None, parts: int, ndim: int, axis: str = MODEL) -> P:
    """Returns the partition spec of an array of a parameter, over a mesh axis."""
    if param is None or parts == 1:
        return P()
    return P(*(axis if place == param.axis else None for place in range(ndim)))


def whole_parts(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """Returns the names of the mixers, and "vocabulary", that do not divide over a
    mesh's axis "model", so that every device has them whole."""
    n = axis_size(mesh, MODEL)
    cut = cut_of(config, n)
    owners = {name: name for name in config.mixers} | {VOCAB: "vocabulary"}
    return [name for owner, name in owners.items() if n > 1 and cut.of(owner) == 1]


def copied_params(model: Model) -> Params:
    """Returns the parameters that every device of the mesh has whole."""

    def copied(path: Path) -> bool:
        return cut_at(model.config, model.cut, path)[1] == 1

    flat = by_path(model.params)
    return nest({path: x for path, x in flat.items() if copied(path)})


def param_specs(model: Model) -> Params:
    """Returns the partition specs of all parameters of a model, nested as they are."""

    def spec(param: Param | None, parts: int, x: Any) -> P:
        return spec_of(param, parts, x.ndim, model.cut.axis)

    return nest(
        {
            path: jax.tree.map(partial(spec, *cut_at(model.config, model.cut, path)), x)
            for path, x in by_path(model.params).items()
        }
    )


def part_of(model: Model) -> Model:
    """Returns a device's part of a model as a model.

    For use inside `jax.shard_map`, where `model.params` is already the device's part.
    """
    config = part_config(model.config, model.cut)
    return Model(model.params, config, cut=model.cut)


def part_indices(param: Param, i: int, parts: int) -> Slices:
    """Returns the slices along `param.axis` that belong to part i."""
    return tuple(part_slices(param.runs, i, parts))


def part_order(param: Param, parts: int) -> np.ndarray:
    """Returns the indices along the divided axis, part after part."""
    each = (part_indices(param, i, parts) for i in range(parts))
    return np.concatenate([np.r_[places] for places in each])


def changes_order(param: Param | None, parts: int) -> bool:
    """True if the parts of a parameter are not consecutive, or overlap."""
    if param is None or parts == 1:
        return False
    order = part_order(param, parts)
    return not np.array_equal(order, np.arange(run_width(param.runs)))


def parts_in_order(weight: Any, param: Param | None, parts: int) -> Any:
    """Returns a parameter as a mesh has it: the parts one after another along the
    divided axis. Heads that several devices need occur several times."""
    if param is None or not changes_order(param, parts):
        return weight
    each = (
        take(weight, part_indices(param, i, parts), param.axis) for i in range(parts)
    )
    return _joined(list(each), param.axis)


def whole_from(weight: Any, param: Param | None, parts: int) -> Any:
    """Returns a parameter in the order on one device: the inverse of
    `parts_in_order`."""
    if param is None or not changes_order(param, parts):
        return weight
    width, begin, pieces = part_width(param.runs, parts), 0, []
    for run in param.runs:
        kinds, own = min(parts, run.units), run.part(0, parts)[1]
        for i in range(0, parts, parts // kinds):  # the first device that has a part
            place = i * width + begin
            pieces.append(take(weight, [slice(place, place + own)], param.axis))
        begin += own
    return _joined(pieces, param.axis)


def _joined(pieces: Sequence[Any], axis: int) -> Any:
    """Concatenates parts of a parameter. Arrays without the axis are equal in all."""
    return jax.tree.map(
        lambda *x: joined(x, axis) if x[0].ndim > axis else x[0], *pieces
    )


def placed(
    make: Make, param: Param | None, parts: int, mesh: Mesh, axis: str = MODEL
) -> Any:
    """Places a parameter on a mesh.

    Args:
      make: returns part i. Called only for the parts of this process's devices, one
        after another.
      param: the parameter's entry in the table. If None, every device has it whole.
      parts: number of devices that divide it.
      mesh: the mesh.
      axis: the mesh axis along which these devices lie.
    """
    once = lru_cache(1)(make)  # the host holds one part at a time
    leaves: list[list[jax.Array]] = []
    kind: Any = None
    cutting = param is not None and parts > 1
    for device, i in _own_devices(mesh, axis):
        part = once(i if cutting else 0)
        flat, kind = jax.tree.flatten(part)
        leaves.append([jax.device_put(leaf, device) for leaf in flat])
    arrays = [
        _assembled(pieces, spec_of(param, parts, pieces[0].ndim, axis), parts, mesh)
        for pieces in zip(*leaves, strict=True)
    ]
    return jax.tree.unflatten(kind, arrays)


def on_mesh(
    host: Any, param: Param | None, parts: int, mesh: Mesh, axis: str = MODEL
) -> Any:
    """Places a parameter that is whole on the host on a mesh; see `placed`."""
    arrays = jax.tree.map(np.asarray, host)

    def make(i: int) -> Any:
        if param is None or parts == 1:
            return arrays
        return take(arrays, part_indices(param, i, parts), param.axis)

    return placed(make, param, parts, mesh, axis)


def _own_devices(mesh: Mesh, axis: str) -> list[tuple[Any, int]]:
    """Returns this process's devices with their indices along an axis, sorted by
    index."""
    here = jax.process_index()
    along = mesh.axis_names.index(axis) if axis in mesh.axis_names else None
    found = [
        (device, 0 if along is None else place[along])
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == here
    ]
    return sorted(found, key=lambda one: one[1])


def _assembled(
    pieces: Sequence[jax.Array], spec: P, parts: int, mesh: Mesh
) -> jax.Array:
    """Builds the global array from its parts on this process's devices."""
    sizes = zip(pieces[0].shape, (*spec, *(None,) * pieces[0].ndim), strict=False)
    shape = [size if axis is None else size * parts for size, axis in sizes]
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)


def constrained(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Constrains the sharding of traced arrays, also under `jax.set_mesh` of the mesh
    with explicit axes."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jax.reshard(tree, spec)
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))
