"""Reads the arrays of a directory in our own format with orbax, onto a device or a
mesh.

A device's part of a parameter is often not contiguous: a part of `in_proj` has some
rows of each of z, x, B, C and dt. Orbax reads contiguous parts. Such a parameter is
therefore read divided along another axis, and then exchanged between the devices.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.models import (
    Format,
    ModelConfig,
    abstract_params,
    by_path,
    nest,
    param_shapes,
    stored,
)
from stree_jax.models.base.shards import MODEL, WHOLE, Cut
from stree_jax.models.configs.params import NORMAL, Param, array_dtype
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.sharding.parts import cut_at
from stree_jax.models.sharding.placement import changes_order, part_order, spec_of
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.param_table import param_at


def restored(
    folder: Path,
    config: ModelConfig,
    kept: Mapping[ParamPath, Any],
    format: Format,
    mesh: Mesh | None = None,
    cut: Cut = WHOLE,
) -> Any:
    """Reads the parameters of a model from an orbax folder.

    On a mesh, or in a format that is not plain, parameters are read in portions of at
    most the size of the largest parameter. Extra memory of that size (on a mesh, of a
    device's share of it) is needed while reading.

    Args:
      folder: the orbax folder. It may have more parameters, which are not read.
      config: the architecture.
      kept: orbax's metadata of the stored parameters, by path.
      format: format in which to keep the weights.
      mesh: mesh to place the parameters on. If None, they are on the default device.
      cut: how the devices of the mesh divide the model, from `placement.cut_for`.
    """
    if mesh is None and format.plain:
        wanted = jax.tree.map(_on_device, abstract_params(config, format))
        return _restore_some(folder, wanted)
    places = {
        path: (param_at(config, path), cut_at(config, cut, path)[1])
        for path in param_shapes(config)
    }
    wanted = {
        path: _as_read(kept[path], *place, format, mesh)
        for path, place in places.items()
    }
    flat: dict[ParamPath, Any] = {}
    for portion in _portions(wanted):
        read = by_path(_restore_some(folder, nest(portion)))
        while read:  # one by one, so that each is freed once it is converted
            path, leaf = read.popitem()
            done = _as_kept(leaf, *places[path], format, mesh)
            flat[path] = jax.block_until_ready(done)
            del leaf, done
    return nest(flat)


def _restore_some(folder: Path, wanted: Any) -> Any:
    """Reads those parameters of a folder that are in `wanted`."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        placed = ocp.checkpoint_utils.construct_restore_args(wanted)
        some = ocp.args.PyTreeRestore(wanted, restore_args=placed, partial_restore=True)
        return checkpointer.restore(folder, args=some)


def _portions(wanted: Mapping[ParamPath, Any]) -> Iterator[dict[ParamPath, Any]]:
    """Yields all parameters in portions of at most the bytes of the largest one."""
    most = max(size_of(leaf) for leaf in wanted.values())
    portion: dict[ParamPath, Any] = {}
    for path, leaf in wanted.items():
        if size_of([*portion.values(), leaf]) > most:
            yield portion
            portion = {}
        portion[path] = leaf
    yield portion


def _on_device(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array of this shape and dtype on the default device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)


def _as_read(
    leaf: Any, param: Param, parts: int, format: Format, mesh: Mesh | None
) -> jax.ShapeDtypeStruct:
    """Returns the array (shape, dtype, sharding) as which orbax reads a parameter.

    If the format is not plain, it is read in its stored dtype.

    Args:
      leaf: orbax's metadata of the parameter.
      param: the parameter's entry in the table.
      parts: number of devices that divide it.
      format: format in which to keep the weights.
      mesh: the mesh, or None.
    """
    if mesh is None:
        return _on_device(leaf)
    dtype = array_dtype(param, format.dtype) if format.plain else leaf.dtype
    sharding = NamedSharding(mesh, _spec_as_read(param, parts, leaf.shape))
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _spec_as_read(param: Param, parts: int, shape: tuple[int, ...]) -> P:
    """Returns the partition spec with which a parameter is read."""
    if not changes_order(param, parts):
        return spec_of(param, parts, len(shape))
    other = _other_axis(param, parts, shape)
    return P(*(MODEL if axis == other else None for axis in range(len(shape))))


def _other_axis(param: Param, parts: int, shape: tuple[int, ...]) -> int | None:
    """Returns an axis that divides by `parts` and is not the parameter's own divided
    axis, or None."""
    axes = (axis for axis, size in enumerate(shape) if size % parts == 0)
    return next((axis for axis in axes if param and axis != param.axis), None)


def _as_kept(
    leaf: jax.Array,
    param: Param,
    parts: int,
    format: Format,
    mesh: Mesh | None,
) -> Any:
    """Converts the array that orbax read to the parameter in the model's format and
    sharding."""
    if mesh is None:
        return stored(param, leaf, format)
    if format.plain and not changes_order(param, parts):
        return leaf  # already in its place
    # `_moved` is compiled once for each different `param`, and does not use the
    # initialiser. With the same one for all, parameters of equal shape share a program.
    param = param._replace(init=NORMAL)
    done = _moved(leaf, param, parts, format, mesh)

    def as_sharded(x: jax.Array) -> jax.Array:
        """Returns the array with exactly this spec, not an equivalent one."""
        sharding = NamedSharding(mesh, spec_of(param, parts, x.ndim))
        here = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, here)

    return jax.tree.map(as_sharded, done)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _moved(
    leaf: jax.Array, param: Param, parts: int, format: Format, mesh: Mesh
) -> Any:
    """Exchanges the parts of a parameter between the devices of a mesh, and converts it
    to the model's format."""
    read = _spec_as_read(param, parts, leaf.shape)
    other, columns = _other_axis(param, parts, leaf.shape), leaf.shape[-1]

    def keep(x: jax.Array) -> Any:
        return stored(param, x, format, columns)

    def local(x: jax.Array) -> Any:
        if changes_order(param, parts):
            axis = param.axis
            x = x.take(part_order(param, parts), axis, mode="clip")
            if other is None:
                width = x.shape[axis] // parts
                begin = lax.axis_index(MODEL) * width
                x = lax.dynamic_slice_in_dim(x, begin, width, axis)
            else:
                x = lax.all_to_all(x, MODEL, axis, other, tiled=True)
        return keep(x)

    whole = jax.eval_shape(keep, leaf)
    done = jax.tree.map(lambda x: spec_of(param, parts, x.ndim), whole)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=read, out_specs=done, check_vma=False
    )
    return run(leaf)
