"""Places parameters on the devices of a mesh, each device with its own part."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.common.checks import flag, shown, with_hints
from stree_jax.models.base.shards import (
    DATA,
    MODEL,
    WHOLE,
    Cut,
    part_slices,
    part_width,
    run_width,
)
from stree_jax.models.layers.params import Param, Params, Path, by_path, nest
from stree_jax.models.sharding.parts import cut_at, cut_of, part_config
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.stack.shapes import abstract_params, param_shapes
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.weight import Format, Stored, take, unit

AnyModel = TypeVar("AnyModel", bound=Model)  # `Model`, or a subclass with a tokenizer
Slices = tuple[slice, ...]
Make = Callable[[int], Any]  # returns part i of a parameter, a pytree of host arrays


def axis_size(mesh: Mesh, axis: str) -> int:
    """Returns the number of devices along an axis; 1 if the mesh does not have it."""
    return mesh.shape.get(axis, 1)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes of type Auto, which this library's `jax.shard_map`
    calls need. The default of `jax.make_mesh` is Explicit."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def cut_for(config: ModelConfig, mesh: Mesh, dtype: Any, whole: bool = False) -> Cut:
    """Returns how the devices of a mesh divide a model.

    Args:
      config: the architecture.
      mesh: the mesh.
      dtype: dtype or format of the weights.
      whole: True if every device has the whole model.

    Raises:
      ValueError: the mesh has axes other than "data" and "model"; no part of the model
        divides by the size of "model"; or the weight format does not allow the
        division.
    """
    if unknown := set(mesh.axis_names) - {DATA, MODEL}:
        raise ValueError(
            f"mesh: unknown axis {min(map(str, unknown))!r}; want {DATA!r} (rows of a "
            f"batch) and {MODEL!r} (parts of a model)"
        )
    if whole:
        return WHOLE
    n = axis_size(mesh, MODEL)
    cut = cut_of(config, n)
    if n > 1 and cut == WHOLE:
        works = ", ".join(str(k) for k in range(2, 65) if cut_of(config, k) != WHOLE)
        raise ValueError(
            f"mesh: no layer of this model divides by {MODEL}={n}; "
            f"these sizes work: {works or 'only 1'}"
        )
    format = format_named(dtype)
    for path, shape in param_shapes(config).items():
        param, parts = cut_at(config, cut, path)
        if param is not None and param.quantizable and parts > 1:
            _check_units(path, shape, param, parts, format)
    return cut


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
            f"{size} do not divide by {MODEL}={parts} in {format}; load in bfloat16, "
            "or use fewer devices"
        )


def spec_of(param: Param | None, parts: int, ndim: int) -> P:
    """Returns the partition spec of an array of a parameter."""
    if param is None or parts == 1:
        return P()
    return P(*(MODEL if axis == param.axis else None for axis in range(ndim)))


def param_specs(model: Model) -> Params:
    """Returns the partition specs of all parameters of a model, nested as they are."""
    flat = {}
    for path, leaf in by_path(model.params).items():
        param, parts = cut_at(model.config, model.cut, path)
        flat[path] = jax.tree.map(
            lambda x, param=param, parts=parts: spec_of(param, parts, x.ndim), leaf
        )
    return nest(flat)


def part_of(model: Model) -> Model:
    """Returns a device's part of a model as a model.

    For use inside `jax.shard_map`, where `model.params` is already the device's part.
    """
    config = part_config(model.config, model.cut)
    return Model(model.params, config, cut=model.cut)


def part_indices(param: Param, i: int, parts: int) -> Slices:
    """Returns the slices along `param.axis` that belong to part i."""
    return tuple(part_slices(param.runs, i, parts))


def placed(make: Make, param: Param | None, parts: int, mesh: Mesh) -> Any:
    """Places a parameter on a mesh.

    Args:
      make: returns part i. Called only for the parts of this process's devices, one
        after another.
      param: the parameter's entry in the table. If None, every device has it whole.
      parts: number of devices that divide it.
      mesh: the mesh.
    """
    once = lru_cache(1)(make)  # the host holds one part at a time
    leaves: list[list[jax.Array]] = []
    kind: Any = None
    cutting = param is not None and parts > 1
    for device, i in _own_devices(mesh):
        part = once(i if cutting else 0)
        flat, kind = jax.tree.flatten(part)
        leaves.append([jax.device_put(leaf, device) for leaf in flat])
    arrays = [
        _assembled(pieces, param, parts, mesh) for pieces in zip(*leaves, strict=True)
    ]
    return jax.tree.unflatten(kind, arrays)


def on_mesh(host: Any, param: Param | None, parts: int, mesh: Mesh) -> Any:
    """Places a parameter that is whole on the host on a mesh; see `placed`."""
    arrays = jax.tree.map(np.asarray, host)

    def make(i: int) -> Any:
        if param is None or parts == 1:
            return arrays
        return take(arrays, part_indices(param, i, parts), param.axis)

    return placed(make, param, parts, mesh)


def _own_devices(mesh: Mesh) -> list[tuple[Any, int]]:
    """Returns this process's devices with their indices along "model", sorted by
    index."""
    here = jax.process_index()
    axis = mesh.axis_names.index(MODEL) if MODEL in mesh.axis_names else None
    found = [
        (device, 0 if axis is None else place[axis])
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == here
    ]
    return sorted(found, key=lambda one: one[1])


def _assembled(
    pieces: Sequence[jax.Array], param: Param | None, parts: int, mesh: Mesh
) -> jax.Array:
    """Builds the global array from its parts on this process's devices."""
    shape, spec = list(pieces[0].shape), spec_of(param, parts, pieces[0].ndim)
    if MODEL in spec:
        shape[spec.index(MODEL)] *= parts
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)


@with_hints
def shard(model: AnyModel, mesh: Mesh, *, whole: bool = False) -> AnyModel:
    """Places a model on the devices of a mesh (tensor and data parallelism).

    Along the mesh axis "model" each device has a part of every layer. Along "data" each
    device has the same part and works on other rows of the batch. Layers whose heads or
    channels do not divide are whole on every device.

    Args:
      model: a model on one device.
      mesh: from `stree_jax.make_mesh` or `jax.make_mesh`, with axes "data", "model" or
        both. The returned model's mesh has axes of type Auto.
      whole: True if every device gets the whole model, as for a small draft model.

    Returns:
      The model on the mesh.

    Raises:
      ValueError: the mesh has other axes; no part of the model divides; the weight
        format does not allow the division; or the model is on a mesh already.

    Example:
      >>> mesh = stree_jax.make_mesh("model=1")
      >>> model = stree_jax.shard(stree_jax.load("demo"), mesh)
      >>> model.mesh.shape["model"]
      1
    """
    if not isinstance(model, Model):
        raise ValueError(
            f"model: want a model from stree_jax.load, got {shown(type(model))}"
        )
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh: want a mesh from stree_jax.make_mesh, got {shown(mesh)}"
        )
    if model.mesh is not None:
        raise ValueError("model: already on a mesh; load it again")
    whole, mesh = flag("whole", whole), automatic(mesh)
    format = model.weight_format.with_params(by_path(model.params))
    cut = cut_for(model.config, mesh, format, whole)

    flat = {
        path: on_mesh(leaf, *cut_at(model.config, cut, path), mesh)
        for path, leaf in by_path(model.params).items()
    }
    return replace(model, params=nest(flat), mesh=mesh, cut=cut)


def abstract_model(config: ModelConfig, dtype: Any, mesh: Mesh) -> Model:
    """Returns the model that `shard` would return, with `jax.ShapeDtypeStruct`s that
    have shardings instead of arrays.

    Raises:
      ValueError: as for `shard`.
    """
    cut = cut_for(config, mesh, dtype)

    def placing(path: Path, leaf: Any) -> Any:
        param, n = cut_at(config, cut, path)
        shape, spec = list(leaf.shape), spec_of(param, n, leaf.ndim)
        # Units that several devices share (`Run.repeats`) occur more than once.
        if param is not None and MODEL in spec:
            every = n * part_width(param.runs, n)
            shape[param.axis] = shape[param.axis] * every // run_width(param.runs)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    whole = by_path(abstract_params(config, dtype))
    flat = {
        path: jax.tree.map(lambda x, path=path: placing(path, x), leaf)
        for path, leaf in whole.items()
    }
    return Model(nest(flat), config, mesh=mesh, cut=cut)
