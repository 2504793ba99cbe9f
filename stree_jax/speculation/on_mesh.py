"""Runs the decoding loop on all devices of a mesh.

Every device runs the whole loop, on its part of the target (`models.base.shards`)
and its rows of the batch. The parts of the target communicate at the end of layers. All
other computations are the same on every part and start from the same logits, so the
parts agree on draft, accepted tokens and output. Rows do not communicate: each shard of
them chooses its own trees, and its loop ends when its rows have finished. What a shard
has for all its rows together, such as the policy's statistics, is an array with one
entry per shard outside `jax.shard_map`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.common.unchecked import unchecked, varying_axes
from stree_jax.models import (
    Model,
    State,
    abstract_params,
    by_path,
    nest,
)
from stree_jax.models.base.shards import Cut, Names
from stree_jax.models.layers.mixer import Leaf, map_leaves
from stree_jax.models.sharding.placement import axis_size, param_specs, part_of
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafter import DrafterBase, DraftState
from stree_jax.speculation.policy import Policy, keeps_by_row
from stree_jax.speculation.step import Spec


def _is_model(x: Any) -> bool:
    return isinstance(x, Model)


def model_specs(tree: Any) -> Any:
    """Returns partition specs of a pytree with models: parameters as they are sharded,
    everything else replicated."""

    def specs(x: Any) -> Any:
        if not _is_model(x):
            return P()
        params = jax.tree.map(lambda _: P(), x.params)
        if x.mesh is not None:
            params = param_specs(x)
        return x.replace(params=params)

    return jax.tree.map(specs, tree, is_leaf=_is_model)


def parts_of(tree: Any) -> Any:
    """Returns a pytree with models as one device sees it, with its parts of the
    parameters."""

    def part(x: Any) -> Any:
        return part_of(x) if _is_model(x) and x.mesh is not None else x

    return jax.tree.map(part, tree, is_leaf=_is_model)


@dataclass(frozen=True)
class Place:
    """The devices that a program runs on.

    Attributes:
      mesh: their mesh. If None, the mesh of `jax.set_mesh`.
      rows: mesh axes over which the rows of the batch are sharded. If None, every
        device has all rows.
      parts: mesh axis over which layers are divided, or None.
    """

    mesh: Mesh | None
    rows: Names | None
    parts: str | None = None

    @property
    def spec(self) -> P:
        """The partition spec of arrays whose first axis is the rows."""
        return P() if self.rows is None else P(self.rows)


def _context() -> jax.sharding.AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def _is_explicit() -> bool:
    """True if the types of arrays have shardings, which operations have to allow."""
    return AxisType.Explicit in _context().axis_types


def place_of(mesh: Mesh | None, cut: Cut, by_row: Any) -> Place | None:
    """Returns the devices that run a model on rows.

    A model on a mesh has its rows over the axes `cut.rows`, if they divide evenly.
    For a model on one device, under a mesh with explicit axes, rows stay where they
    are. In all other cases this device has everything, and the result is None.

    Args:
      mesh: the model's mesh, or None.
      cut: how its devices divide the model.
      by_row: any array whose first axis is the rows.

    Raises:
      ValueError: the model's mesh is not that of `jax.set_mesh`.
    """
    context = _context()
    if mesh is None:
        if not _is_explicit():
            return None
        spec = jax.typeof(by_row).sharding.spec
        return Place(None, spec[0] if len(spec) else None)
    if not context.empty and context.shape_tuple != mesh.abstract_mesh.shape_tuple:
        raise ValueError(
            f"model: on a mesh {dict(mesh.shape)}, inside another one, "
            f"{dict(context.shape)}"
        )
    if AxisType.Manual in context.axis_types:
        raise ValueError("model: on a mesh; inside jax.shard_map, want a whole model")
    names = (cut.rows,) if isinstance(cut.rows, str) else cut.rows
    names = tuple(name for name in names if name in mesh.axis_names)
    n = axis_size(mesh, names)
    rows = names if n > 1 and by_row.shape[0] % n == 0 else None
    parts = cut.axis if cut.axis in mesh.axis_names else None
    return Place(mesh if context.empty else None, rows, parts)


def row_specs(tree: Any, place: Place) -> Any:
    """Returns partition specs of a pytree whose leaves have rows as first axis."""

    def spec(leaf: Any, info: Leaf) -> P:
        axes = range(1, leaf.ndim)
        parts = (place.parts if i == info.part_axis else None for i in axes)
        return P(place.rows, *parts)

    return map_leaves(spec, tree)


def request_specs(requests: Requests, place: Place) -> Requests:
    """Returns partition specs of requests. The tables of automata are replicated."""
    specs: Requests = row_specs(requests, place)
    return specs.with_shared(P())


def decoding_specs(d: Decoding, policy: Policy, place: Place) -> Decoding:
    """Returns partition specs of a batch, whose leaves without rows have one entry per
    shard of the rows."""
    batch: Any = replace(d, policy=None)
    specs = row_specs(batch, place)
    return replace(
        specs,
        requests=request_specs(d.requests, place),
        policy=jax.tree.map(lambda _: place.spec, keeps_by_row(policy)),
        choice=place.spec,
    )


def device_rows(model: Model, batch: int) -> int:
    """Returns how many of a batch's rows each device decodes."""
    place = place_of(model.mesh, model.cut, jax.ShapeDtypeStruct((batch,), jnp.int32))
    if place is None or place.rows is None:
        return batch
    return batch // axis_size(place.mesh or _context(), place.rows)


def laid_out(spec: Spec, d: Decoding) -> Decoding:
    """Gives a batch the shardings that the decoding loop gives it, if the target is on
    a mesh. Arrays inside `jax.jit` are constrained; shapes get a `sharding`."""
    place = place_of(spec.target.mesh, spec.target.cut, d.length)
    if place is None or place.mesh is None:
        return d
    return _sharded(place.mesh, d, decoding_specs(d, spec.policy, place))


def models_laid_out(tree: Any) -> Any:
    """Gives the shapes of models on a mesh the shardings of their parameters.
    `jax.eval_shape` returns shapes without."""

    def put(x: Any) -> Any:
        if not _is_model(x) or x.mesh is None:
            return x
        return x.replace(params=_sharded(x.mesh, x.params, param_specs(x)))

    return jax.tree.map(put, tree, is_leaf=_is_model)


def past_laid_out(model: Model, past: Any) -> Any:
    """Moves the states of target and drafter to the devices that continue them, if the
    model is on a mesh."""
    leaves = jax.tree.leaves(past)
    place = place_of(model.mesh, model.cut, leaves[0]) if leaves else None
    if place is None or place.mesh is None:
        return past
    return _sharded(place.mesh, past, row_specs(past, place))


def _sharded(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Gives arrays, tracers or shapes the shardings of partition specs."""

    def put(x: Any, spec: P) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(x, sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree, specs)


def with_shards(d: Decoding, policy: Policy, place: Place) -> Decoding:
    """Gives what all rows have in common, such as the policy's statistics, an axis of
    shards, for a new batch on a mesh."""
    if place.rows is None:
        return d
    n = axis_size(place.mesh or _context(), place.rows)
    return _map_shared(lambda x: jnp.repeat(x[None], n, axis=0), d, policy)


def _with_shards(d: Decoding, policy: Policy, place: Place) -> Decoding:
    """Gives what a shard has for all its rows an axis of shards."""
    return d if place.rows is None else _map_shared(lambda x: x[None], d, policy)


def _of_shard(d: Decoding, policy: Policy, place: Place) -> Decoding:
    """Removes the axis of shards; the inverse of `_with_shards`."""
    return d if place.rows is None else _map_shared(lambda x: x[0], d, policy)


def _map_shared(
    f: Callable[[jax.Array], jax.Array], d: Decoding, policy: Policy
) -> Decoding:
    """Applies a function to the choice and the policy's arrays without rows."""
    learnt = jax.tree.map(
        lambda by_row, x: x if by_row else f(x), keeps_by_row(policy), d.policy
    )
    return replace(d, policy=learnt, choice=f(d.choice))


def on_mesh(
    function: Callable[..., Any],
    place: Place,
    models: Any,
    args: tuple,
    arg_specs: tuple,
    out_specs: Any,
) -> Any:
    """Runs `function(models, *args)` on every device of a mesh.

    Args:
      function: runs on each device, with that device's parts of the arguments.
      place: the devices.
      models: a pytree with models. The function receives `parts_of(models)`.
      args: other arguments.
      arg_specs: partition specs of `args`.
      out_specs: partition specs of the result.
    """

    def local(models: Any, *args: Any) -> Any:
        return function(parts_of(models), *args)

    specs, given = (model_specs(models), *arg_specs), (models, *args)
    if _is_explicit():  # `jax.shard_map` wants the specs that arrays already have
        each = jax.tree.broadcast(specs, given)
        given = jax.tree.map(jax.reshard, given, each)
    # Replicated results are equal on every device by construction, but JAX cannot check
    # that for custom calls.
    run = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return run(*given)


def on_one_device(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)` for a model and rows on one device.

    Inside a `jax.shard_map` with `check_vma`, JAX would check the types of all loops.
    Rows are independent and nothing here communicates, so the function becomes one
    operation.
    """
    return unchecked(function, *args) if varying_axes(args) else function(*args)


def rows_on(
    model: Model, function: Callable[..., jax.Array], rows: jax.Array, *others: Any
) -> jax.Array:
    """Returns `function(model, rows, *others)`, with rows where they are or, for a
    model on a mesh, where its rows are. The others have the same rows; automata of
    `Requests` are for all rows."""
    place = place_of(model.mesh, model.cut, rows)
    if place is None:
        return on_one_device(function, model, rows, *others)
    args = rows, *others
    specs = tuple(
        request_specs(x, place) if isinstance(x, Requests) else place.spec for x in args
    )
    return on_mesh(function, place, model, args, specs, place.spec)


def whole_on(model: Model, function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(model, *args)` on the model's mesh, if it has one, with replicated
    arguments and results."""
    place = place_of(model.mesh, model.cut, jnp.zeros((1,)))
    if place is None:
        return function(model, *args)
    return on_mesh(function, place, model, args, (P(),) * len(args), P())


# token_ids, lengths, requests, earlier
Texts = tuple[jax.Array, jax.Array, Requests, jax.Array | None]
Past = tuple[State, Any] | None


def begun_on(
    place: Place, begin: Callable[..., Decoding], spec: Spec, texts: Texts, past: Past
) -> Decoding:
    """Runs `begin(spec, *texts, past)`, which prefills the prompts, on a mesh."""
    trace = begin
    if _is_explicit():
        trace = jax.sharding.auto_axes(begin, out_sharding=P())
    shapes = jax.eval_shape(trace, _whole(spec), *texts, None)
    requests = request_specs(texts[2], place)
    specs = *(place.spec, place.spec, requests, place.spec), row_specs(past, place)
    out = decoding_specs(shapes, spec.policy, place)

    def run(spec: Spec, *args: Any) -> Decoding:
        return _with_shards(begin(spec, *args), spec.policy, place)

    return on_mesh(run, place, spec, (*texts, past), specs, out)


def advanced_on(
    place: Place,
    advance: Callable[..., Decoding],
    spec: Spec,
    decoding: Decoding,
    max_steps: jax.Array,
) -> Decoding:
    """Runs `advance(spec, decoding, max_steps)` on a mesh."""
    specs = decoding_specs(decoding, spec.policy, place)

    def run(spec: Spec, d: Decoding, max_steps: jax.Array) -> Decoding:
        d = advance(spec, _of_shard(d, spec.policy, place), max_steps)
        return _with_shards(d, spec.policy, place)

    return on_mesh(run, place, spec, (decoding, max_steps), (specs, P()), specs)


def committed_on(place: Place, commit: Callable[..., State], *args: Any) -> State:
    """Runs `commit(state, records, path, length)` on a mesh."""
    specs = row_specs(args, place)
    return on_mesh(lambda _, *args: commit(*args), place, (), args, specs, specs[0])


def read_on(spec: Spec, drafting: DraftState, by_row: jax.Array) -> DraftState:
    """Runs `DrafterBase.read_for_cache` on the target's mesh, or on one device.

    Args:
      spec: the configuration of the decoder.
      drafting: the drafter's state.
      by_row: any array whose first axis is the rows of the state.
    """
    place = place_of(spec.target.mesh, spec.target.cut, by_row)
    if place is None:
        return spec.drafter.read_for_cache(drafting)
    specs, state = row_specs(drafting, place), (drafting,)

    def run(drafter: DrafterBase, state: DraftState) -> DraftState:
        return drafter.read_for_cache(state)

    return on_mesh(run, place, spec.drafter, state, (specs,), specs)


def _whole(tree: Any) -> Any:
    """Returns a pytree in which models on a mesh are abstract models on one device, for
    tracing the structure of results."""

    def whole(x: Any) -> Any:
        if not _is_model(x) or x.mesh is None:
            return x
        every = by_path(abstract_params(x.config, x.weight_format))
        return Model(nest({path: every[path] for path in by_path(x.params)}), x.config)

    return jax.tree.map(whole, tree, is_leaf=_is_model)


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Replicates arrays on every device of a mesh, except those of models that are
    already on it."""
    sharding = NamedSharding(mesh, P())

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        # Across processes only the numbers of a key array can be put on devices.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            numbers, impl = jax.random.key_data(leaf), jax.random.key_impl(leaf)
            return jax.random.wrap_key_data(whole(numbers), impl=impl)
        return jax.device_put(leaf, sharding)

    def put(x: Any) -> Any:
        on_it = _is_model(x) and x.mesh is not None
        return x if on_it else jax.tree.map(whole, x)

    return jax.tree.map(put, tree, is_leaf=_is_model)


def to_host(tree: Any) -> Any:
    """Returns the arrays as NumPy arrays, complete in every process."""
    leaves = jax.tree.leaves(tree)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in arrays):
        return jax.device_get(tree)
    shardings = (x.sharding for x in arrays)
    mesh = next(s.mesh for s in shardings if isinstance(s, NamedSharding))
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    return jax.device_get(whole(tree))
