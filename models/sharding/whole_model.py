"""`shard` and `unshard`: a whole model from one device to a mesh, and back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.common.checks import flag, shown, with_hints
from stree_jax.models.base.shards import (
    DATA,
    MODEL,
    WHOLE,
    Cut,
    Names,
    part_width,
    run_width,
)
from stree_jax.models.configs.params import Param, nest
from stree_jax.models.layers.params import by_path
from stree_jax.models.sharding.parts import cut_at
from stree_jax.models.sharding.placement import (
    automatic,
    changes_order,
    constrained,
    cut_for,
    on_mesh,
    parts_in_order,
    spec_of,
    whole_from,
)
from stree_jax.models.stack.adapters import has_adapter
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.stack.shapes import abstract_params
from stree_jax.models.weights.stack import Stack

AnyModel = TypeVar("AnyModel", bound=Model)  # `Model`, or a subclass with a tokenizer
Place = Callable[[Any, Param | None, int, Mesh, str], Any]


@with_hints
def shard(
    model: AnyModel,
    mesh: Mesh,
    *,
    whole: bool = False,
    rows: Names = DATA,
    parts: str = MODEL,
) -> AnyModel:
    """Places a model on the devices of a mesh (tensor and data parallelism).

    Along the mesh axis `parts` each device has a part of every layer. Along `rows` each
    device has the same part and works on other rows of the batch. Layers whose heads or
    channels do not divide are whole on every device.

    The result has the same parameters, paths and dtypes. A divided array is sharded
    over `parts` along one axis and consists of the devices' parts in order: each has
    its share of every tensor that the array concatenates, such as queries, keys and
    values. `unshard` is the inverse.

    Inside `jax.jit` the weights go from device to device, without the host. If the
    arrays of the model are `jax.ShapeDtypeStruct`s, so are those of the result, with
    shardings: a target for orbax to restore onto.

    Args:
      model: a model on one device. Inside `jax.jit` its arrays may be sharded in any
        way over the devices of the mesh.
      mesh: from `stree_jax.make_mesh` or `jax.make_mesh`, with axes `rows`, `parts` or
        both. The returned model's mesh has axes of type Auto.
      whole: True if every device gets the whole model, as for a small draft model.
      rows: the axis, or several, over which the rows of a batch are spread.
      parts: the axis over which the layers are divided.

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
    if has_adapter(model.params):
        raise ValueError("model: has an adapter; load it with the adapter merged")
    whole, mesh, axes = flag("whole", whole), automatic(mesh), _axes(rows, parts)
    for argument, names, usual in (("rows", rows, DATA), ("parts", parts, MODEL)):
        each = (names,) if isinstance(names, str) else names
        if names != usual and (missing := set(each) - {*mesh.axis_names}):
            raise ValueError(
                f"{argument}: the mesh has no axis {shown(min(missing))}; its axes are "
                f"{', '.join(map(str, mesh.axis_names))}"
            )
    format = model.weight_format.with_params(by_path(model.params))
    cut = cut_for(model.config, mesh, format, whole, axes)
    place = _placing(model)
    flat = {
        path: place(leaf, *cut_at(model.config, cut, path), mesh, cut.axis)
        for path, leaf in by_path(model.params).items()
    }
    return replace(model, params=nest(flat), mesh=mesh, cut=cut)


def _axes(rows: Any, parts: Any) -> Cut:
    """Returns the names of mesh axes, of a model that is not divided yet.

    Raises:
      ValueError: a name is not a string, or occurs twice.
    """
    names = (rows,) if isinstance(rows, str) else rows
    if not isinstance(names, tuple) or not all(isinstance(x, str) for x in names):
        raise ValueError(f"rows: want an axis name or several, got {shown(rows)}")
    if not isinstance(parts, str):
        raise ValueError(f"parts: want an axis name, got {shown(parts)}")
    if len({*names, parts}) != len(names) + 1:
        raise ValueError(
            f"parts: want another axis than rows={shown(rows)}, got {parts!r}"
        )
    return Cut(axis=parts, rows=rows)


def _placing(model: Model) -> Place:
    """Returns the function that places the parameters of a model: arrays on the host or
    a device, tracers, or shapes."""
    leaves = jax.tree.leaves(model.params)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return _traced
    return _abstract if isinstance(leaves[0], jax.ShapeDtypeStruct) else on_mesh


def _traced(weight: Any, param: Param | None, parts: int, mesh: Mesh, axis: str) -> Any:
    """Places a parameter on a mesh inside `jax.jit`."""
    if changes_order(param, parts):  # of a whole weight, each device takes its part
        weight = parts_in_order(constrained(weight, mesh, P()), param, parts)
    return jax.tree.map(
        lambda x: constrained(x, mesh, spec_of(param, parts, x.ndim, axis)), weight
    )


def _abstract(
    weight: Any, param: Param | None, parts: int, mesh: Mesh | AbstractMesh, axis: str
) -> Any:
    """Returns the shapes and shardings of a parameter on a mesh."""

    def placing(x: Any) -> jax.ShapeDtypeStruct:
        shape, spec = list(x.shape), spec_of(param, parts, x.ndim, axis)
        # Units that several devices share (`Run.repeats`) occur more than once.
        if param is not None and axis in spec:
            every = parts * part_width(param.runs, parts)
            shape[param.axis] = shape[param.axis] * every // run_width(param.runs)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=sharding)

    return jax.tree.map(placing, weight)


def abstract_model(
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | AbstractMesh,
    like: Cut | None = None,
) -> Model:
    """Returns the shapes of the model that `shard` would return.

    Args:
      config: the architecture.
      dtype: dtype or format of the weights.
      mesh: the mesh.
      like: the cut of another model on this mesh, whose axes are used. If its devices
        have the whole model, so have those of this one. If None, the axes have the
        usual names.

    Raises:
      ValueError: as for `shard`.
    """
    whole = like is not None and not like.parts
    cut = cut_for(config, mesh, dtype, whole, like or WHOLE)
    flat = {
        path: _abstract(leaf, *cut_at(config, cut, path), mesh, cut.axis)
        for path, leaf in by_path(abstract_params(config, dtype)).items()
    }
    return Model(nest(flat), config, mesh=cast(Mesh, mesh), cut=cut)


@with_hints
def unshard(model: AnyModel) -> AnyModel:
    """Returns a model on a mesh as a model on one device: the inverse of `shard`.

    Its arrays are whole, in the order of `stree_jax.load`. Outside `jax.jit` every
    device of the mesh has all of them; inside, the `out_shardings` of `jax.jit` decide.

    Args:
      model: a model from `shard`, or from `load` with a mesh.

    Returns:
      The model with `mesh=None`.

    Raises:
      ValueError: the model is not on a mesh, or its format stores the rows of a matrix
        in several ways.

    Example:
      >>> mesh = stree_jax.make_mesh("model=1")
      >>> model = stree_jax.shard(stree_jax.load("demo"), mesh)
      >>> stree_jax.unshard(model).mesh is None
      True
    """
    if not isinstance(model, Model) or model.mesh is None:
        raise ValueError("model: want a model on a mesh, from stree_jax.shard")
    _check_orders(model)
    leaves, mesh = jax.tree.leaves(model.params), model.mesh
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return jax.jit(unshard, out_shardings=NamedSharding(mesh, P()))(model)
    return _whole(
        model,
        lambda weight, other: constrained(weight, mesh, P()) if other else weight,
    )


def is_local(model: Model) -> bool:
    """True if no other process has parts of the model."""
    return all(x.is_fully_addressable for x in jax.tree.leaves(model.params))


def gathered(model: Model) -> Model | None:
    """Returns a model on a mesh as a model on one device, to write it: no device need
    hold the model. Parameters whose parts are in another order than on one device are
    read into the host's memory, one after another. The others stay where they are.

    If several processes have parts of the model, each has to call this function.
    Process 0 reads all parameters into its host's memory; the others return None.

    Raises:
      ValueError: as `unshard`.
    """
    _check_orders(model)  # in every process, before one waits for the others
    alone, leaves = is_local(model), jax.tree.leaves(model.params)
    if not alone and jax.process_index():
        for leaf in leaves:
            process_allgather(leaf, tiled=True)
        return None

    def gather(weight: Any, other: bool) -> Any:
        if not alone:
            return jax.tree.map(lambda x: process_allgather(x, tiled=True), weight)
        return jax.device_get(weight) if other else weight

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _whole(model, gather)


def _whole(model: AnyModel, gather: Callable[[Any, bool], Any]) -> AnyModel:
    """Returns a model with its parameters in the order on one device.

    Args:
      model: a model on a mesh.
      gather: puts the parts of a parameter together, in the order of the devices. Its
        second argument says whether that is another order than on one device.
    """
    flat = {}
    for path, weight in by_path(model.params).items():
        param, parts = cut_at(model.config, model.cut, path)
        every = gather(weight, changes_order(param, parts))
        flat[path] = whole_from(every, param, parts)
    return replace(model, params=nest(flat), mesh=None, cut=WHOLE)


def _check_orders(model: Model) -> None:
    """Checks that the parameters can be put into the order on one device.

    Raises:
      ValueError: a format stores the rows of a matrix in several ways.
    """
    for path, weight in by_path(model.params).items():
        other = changes_order(*cut_at(model.config, model.cut, path))
        if other and isinstance(weight, Stack):
            raise ValueError(f"model: {'/'.join(path)} is stored in several ways")
