"""Parameters on the devices of a mesh: each device has its own part of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.checks import flag, shown, with_hints
from stree_jax.models.config import ModelConfig
from stree_jax.models.model import Model, weights_dtype
from stree_jax.models.param_table import param_shapes
from stree_jax.models.params import (
    GROUP,
    Param,
    Params,
    Path,
    by_path,
    group_of,
    is_int8,
    nest,
)
from stree_jax.models.shapes import abstract_params
from stree_jax.models.sharding.parts import cut_at, cut_of, part_config
from stree_jax.models.sharding.shards import (
    DATA,
    MODEL,
    WHOLE,
    Cut,
    part_slices,
    part_width,
    run_width,
)
from stree_jax.models.weights.int8 import Quantized

AnyModel = TypeVar("AnyModel", bound=Model)  # with a tokenizer or without
Slices = tuple[slice, ...]
Make = Callable[[int], Any]  # part i of a parameter: host arrays, a pytree of one kind


def axis_size(mesh: Mesh, axis: str) -> int:
    """Devices along an axis; 1 if the mesh does not have it."""
    return mesh.shape.get(axis, 1)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes of type Auto, which `jax.shard_map` runs over here.

    `jax.make_mesh` makes axes of type Explicit unless told otherwise.
    """
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def cut_for(config: ModelConfig, mesh: Mesh, dtype: Any, whole: bool = False) -> Cut:
    """How a model of `dtype` is cut over a mesh.

    Args:
      whole: it is not, every device has all of it.

    Raises:
      ValueError: other axes than "data" and "model"; nothing of the model divides by
        the devices of "model"; scales of int8 weights do not.
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
            f"these sizes work: {works or '1 alone'}"
        )
    for path, shape in param_shapes(config).items():
        param, parts = cut_at(config, cut, path)
        if param is None or parts == 1 or param.axis != 1:
            continue
        if is_int8(path[-1], shape, dtype):
            _check_groups(path, param, shape[1], parts)
    return cut


def _check_groups(path: Path, param: Param, columns: int, parts: int) -> None:
    size = group_of(columns)
    runs = [run for i in range(parts) for run in part_indices(param, i, parts)]
    if size is None or any(run.start % size or run.stop % size for run in runs):
        what = "one scale a row" if size is None else f"scales of {size} columns"
        raise ValueError(
            f"mesh: {'/'.join(path)}: {columns} columns with {what} do not divide by "
            f"{MODEL}={parts} in int8; load in bfloat16, or take fewer devices"
        )


def spec_of(param: Param | None, parts: int, ndim: int) -> P:
    """Along which axis of a mesh a parameter's axes are cut."""
    if param is None or parts == 1:
        return P()
    return P(*(MODEL if axis == param.axis else None for axis in range(ndim)))


def param_specs(model: Model) -> Params:
    """`spec_of` every parameter, of a model or of some of its parameters."""
    flat = {}
    for path, leaf in by_path(model.params).items():
        param, parts = cut_at(model.config, model.cut, path)
        flat[path] = jax.tree.map(
            lambda x, param=param, parts=parts: spec_of(param, parts, x.ndim), leaf
        )
    return nest(flat)


def part_of(model: Model) -> Model:
    """A device's part of a model, whose parameters are its own already."""
    config = part_config(model.config, model.cut)
    return Model(model.params, config, cut=model.cut)


def group_for(path: Path, shape: tuple[int, ...]) -> int | None:
    """Columns that share a scale of the whole int8 weight, for `params.stored`."""
    return group_of(shape[1]) if len(shape) == 2 else GROUP


def part_indices(param: Param, i: int, parts: int) -> Slices:
    """The places, along `param.axis`, of part i."""
    return tuple(part_slices(param.runs, i, parts))


def placed(make: Make, param: Param | None, parts: int, mesh: Mesh) -> Any:
    """A parameter as arrays on a mesh.

    Args:
      make: is asked for the parts of this process's devices alone, one after another.
      param: its entry in the layer's table; None: every part has it all.
    """
    once = lru_cache(1)(make)  # a part at a time is held beside those on devices
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


def _own_devices(mesh: Mesh) -> list[tuple[Any, int]]:
    """This process's devices, and their places along "model"; part after part."""
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
    """The array of which these are the pieces of this process's devices."""
    shape, spec = list(pieces[0].shape), spec_of(param, parts, pieces[0].ndim)
    if param is not None and parts > 1:
        shape[param.axis] *= parts
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, pieces)


@with_hints
def shard(model: AnyModel, mesh: Mesh, *, whole: bool = False) -> AnyModel:
    """The same model on the devices of a mesh.

    Along the mesh's axis "model" each device has a part of every layer, along "data"
    each has the same, and rows of a batch of its own. Layers whose heads or channels do
    not divide are on every device.

    Args:
      model: on one device.
      mesh: of `jax.make_mesh` or `stree_jax.make_mesh`, with axes "data" and "model",
        or one of them. The model's own mesh has its axes made automatic.
      whole: whether every device has all of it: for a drafter that is small.

    Raises:
      ValueError: other axes; nothing of the model divides; it is on a mesh already.
    """
    if not isinstance(model, Model):
        raise ValueError(
            f"model: want a model of stree_jax.load, got {shown(type(model))}"
        )
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: want a mesh of stree_jax.make_mesh, got {shown(mesh)}")
    if model.mesh is not None:
        raise ValueError("model: it is on a mesh already; load it again")
    whole, mesh = flag("whole", whole), automatic(mesh)
    dtype = weights_dtype(model.params)
    cut = cut_for(model.config, mesh, dtype, whole)

    def on_mesh(path: Path, leaf: Any) -> Any:
        param, parts = cut_at(model.config, cut, path)
        host = jax.tree.map(np.asarray, leaf)

        def make(i: int) -> Any:
            if param is None or parts == 1:
                return host
            return taken(host, param, part_indices(param, i, parts))

        return placed(make, param, parts, mesh)

    flat = {path: on_mesh(path, leaf) for path, leaf in by_path(model.params).items()}
    return replace(model, params=nest(flat), mesh=mesh, cut=cut)


def taken(leaf: Any, param: Param, places: Slices) -> Any:
    """Some places, along `param.axis`, of a parameter on the host."""
    if isinstance(leaf, Quantized):
        size, scales = leaf.q.shape[1] // leaf.scale.shape[1], places
        if param.axis == 1:
            scales = tuple(slice(s.start // size, s.stop // size) for s in places)
        q = taken(leaf.q, param, places)
        return Quantized(q, taken(leaf.scale, param, scales))
    before = (slice(None),) * param.axis
    pieces = [leaf[(*before, place)] for place in places]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=param.axis)


def abstract_model(config: ModelConfig, dtype: Any, mesh: Mesh) -> Model:
    """What `shard` would make of a model of `dtype`: shapes and shardings, no arrays.

    Raises:
      ValueError: as `shard`.
    """
    cut = cut_for(config, mesh, dtype)

    def placing(path: Path, leaf: Any) -> Any:
        param, n = cut_at(config, cut, path)
        shape = list(leaf.shape)
        if param is not None and n > 1:  # what repeats is there more than once
            every = n * part_width(param.runs, n)
            shape[param.axis] = shape[param.axis] * every // run_width(param.runs)
        sharding = NamedSharding(mesh, spec_of(param, n, leaf.ndim))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    whole = by_path(abstract_params(config, dtype))
    flat = {
        path: jax.tree.map(lambda x, path=path: placing(path, x), leaf)
        for path, leaf in whole.items()
    }
    return Model(nest(flat), config, mesh=mesh, cut=cut)
