"""Calls a function inside `jax.shard_map` as one operation that JAX does not check.

With `check_vma`, `jax.shard_map` tracks along which mesh axes each array varies, and a
loop may not begin with a constant and end with an array that varies. A function that
does not communicate may ignore this: its results vary along the axes along which any
argument varies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the mesh axes along which any array (or type of one) varies, inside a
    `jax.shard_map` with `check_vma`. Empty elsewhere."""
    types = (
        x if isinstance(x, ShapedArray) else jax.typeof(x)
        for x in jax.tree.leaves(tree)
    )
    kinds = (getattr(x, "manual_axis_type", None) for x in types)
    found = {axis for kind in kinds for axis in getattr(kind, "varying", ())}
    return tuple(sorted(found))


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns arrays as arrays that vary along these axes and their own."""

    def one(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(one, tree) if axes else tree


def unvarying(array: ShapedArray) -> ShapedArray:
    """Returns the type of an array that does not vary."""
    return ShapedArray(array.shape, array.dtype, array.weak_type)


def type_like(array: ShapedArray, other: ShapedArray) -> ShapedArray:
    """Returns the type of an array that varies as another one."""
    whole = other.sharding.update(spec=P(*(None,) * len(array.shape)))
    kind = other.manual_axis_type
    return array.update(sharding=whole, manual_axis_type=kind)


def unchecked(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`. Cannot be differentiated.

    Args:
      function: a function of pytrees of arrays that does not communicate.
      *args: its arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [jnp.asarray(x) for x in leaves]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    out_tree: Any = None

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        nonlocal out_tree
        outs, out_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        return outs

    jaxpr = jax.make_jaxpr(flat)(*shapes)
    outs = _unchecked.bind(*leaves, jaxpr=jaxpr)
    outs = jax.lax.pcast(outs, varying_axes(leaves), to="varying")
    return jax.tree.unflatten(out_tree, outs)


_unchecked = Primitive("unchecked")
_unchecked.multiple_results = True


@_unchecked.def_impl
def _run(*args: jax.Array, jaxpr: ClosedJaxpr) -> list[jax.Array]:
    return jax.jit(jaxpr_as_fun(jaxpr))(*args)


@_unchecked.def_abstract_eval
def _abstract(*_: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return list(jaxpr.out_avals)


def _lower(ctx: Any, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    """Lowers the function with arguments that do not vary."""
    ctx = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


mlir.register_lowering(_unchecked, _lower)
