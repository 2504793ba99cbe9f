"""Runs the decoding loop on all devices of a mesh.

Every device runs the whole loop, on its part of the target (`models.base.shards`)
and its rows of the batch. The parts of the target communicate at the end of layers. All
other computations are the same on every part and start from the same logits, so the
parts agree on draft, accepted tokens and output. Rows communicate for decisions of the
whole batch: whether any row is running, and which tree comes next.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stree_jax.models import (
    Model,
    State,
    abstract_params,
    by_path,
    nest,
)
from stree_jax.models.base.shards import DATA, MODEL
from stree_jax.models.layers.mixer import Leaf, map_leaves
from stree_jax.models.sharding.placement import axis_size, param_specs, part_of
from stree_jax.sampling.requests import Requests, StopAutomata
from stree_jax.speculation.decoding import Decoding
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


def row_specs(tree: Any, rows: str | None) -> Any:
    """Returns partition specs of a pytree whose leaves have rows as first axis; scalars
    are replicated."""

    def spec(leaf: Any, info: Leaf) -> P:
        if leaf.ndim == 0:
            return P()
        axes = range(1, leaf.ndim)
        return P(rows, *(MODEL if i == info.part_axis else None for i in axes))

    return map_leaves(spec, tree)


def request_specs(requests: Requests, rows: str | None) -> Requests:
    """Returns partition specs of requests. The table of stop strings is replicated."""
    specs = row_specs(requests, rows)
    if requests.stop_strings is None:
        return specs
    automata: Any = StopAutomata
    return replace(specs, stop_strings=automata(table=P(), automaton=P(rows)))


def decoding_specs(d: Decoding, policy: Policy, rows: str | None) -> Decoding:
    """Returns partition specs of a batch."""
    policy_specs = jax.tree.map(
        lambda by_row: P(rows) if by_row else P(), keeps_by_row(policy)
    )
    specs = row_specs(d, rows)
    requests = request_specs(d.requests, rows)
    return replace(specs, requests=requests, policy=policy_specs)


def rows_axis(mesh: Mesh, count: int) -> str | None:
    """Returns the mesh axis over which `count` rows are sharded. None if they do not
    divide evenly; then every device has all rows."""
    n = axis_size(mesh, DATA)
    return DATA if n > 1 and count % n == 0 else None


def on_mesh(
    function: Callable[..., Any],
    mesh: Mesh,
    models: Any,
    args: tuple,
    arg_specs: tuple,
    out_specs: Any,
) -> Any:
    """Runs `function(models, *args)` on every device of a mesh.

    Args:
      function: runs on each device, with that device's parts of the arguments.
      mesh: the mesh.
      models: a pytree with models. The function receives `parts_of(models)`.
      args: other arguments.
      arg_specs: partition specs of `args`.
      out_specs: partition specs of the result.
    """

    def local(models: Any, *args: Any) -> Any:
        return function(parts_of(models), *args)

    def there(spec: P) -> P:
        """Returns a spec without axes that this mesh lacks ("data" or "model")."""
        return P(*(axis if axis in mesh.axis_names else None for axis in spec))

    in_specs = (model_specs(models), *arg_specs)
    in_specs, out_specs = jax.tree.map(there, (in_specs, out_specs))

    # Replicated results are equal on every device by construction, but JAX cannot check
    # that for custom calls.
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return run(models, *args)


def on_one_device(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)` for a model on one device.

    Under `jax.set_mesh` of a mesh with explicit axes, array types contain shardings.
    The loops here do not specify them, so the function runs with automatic axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return function(*args)
    return jax.sharding.auto_axes(function, out_sharding=P())(*args)


def whole_on(model: Model, function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(model, *args)` on the model's mesh, if it has one, with replicated
    arguments and results."""
    if model.mesh is None:
        return on_one_device(function, model, *args)
    return on_mesh(function, model.mesh, model, args, (P(),) * len(args), P())


Texts = tuple[jax.Array, jax.Array, Requests]  # token_ids, lengths, requests
Past = tuple[State, Any] | None


def begun_on(
    mesh: Mesh, begin: Callable[..., Decoding], spec: Spec, texts: Texts, past: Past
) -> Decoding:
    """Runs `begin(spec, *texts, past)`, which prefills the prompts, on a mesh."""
    token_ids, lengths, requests = texts
    rows = rows_axis(mesh, token_ids.shape[0])
    shapes = jax.eval_shape(begin, _whole(spec), *texts, None)
    specs = P(rows), P(rows), request_specs(requests, rows), row_specs(past, rows)
    out = decoding_specs(shapes, spec.policy, rows)
    run = partial(_spread, begin, rows)
    return on_mesh(run, mesh, spec, (*texts, past), specs, out)


def advanced_on(
    mesh: Mesh,
    advance: Callable[..., Decoding],
    spec: Spec,
    decoding: Decoding,
    max_steps: jax.Array,
) -> Decoding:
    """Runs `advance(spec, decoding, max_steps)` on a mesh."""
    rows = rows_axis(mesh, decoding.length.shape[0])
    specs = decoding_specs(decoding, spec.policy, rows)
    args = decoding, max_steps
    run = partial(_spread, advance, rows)
    return on_mesh(run, mesh, spec, args, (specs, P()), specs)


def _spread(
    function: Callable[..., Decoding], rows: str | None, spec: Spec, *args: Any
) -> Decoding:
    """Calls `function` with the batch's rows sharded over the mesh axis `rows`."""
    policy = spec.policy.with_rows(rows)
    return function(replace(spec, rows=rows, policy=policy), *args)


def committed_on(mesh: Mesh, commit: Callable[..., State], *args: Any) -> State:
    """Runs `commit(state, records, path, length)` on a mesh."""
    rows = rows_axis(mesh, args[-1].shape[0])
    specs = row_specs(args, rows)
    return on_mesh(lambda _, *args: commit(*args), mesh, (), args, specs, specs[0])


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
