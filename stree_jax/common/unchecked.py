"""Calls a function inside `jax.shard_map` as one operation that JAX does not check.

With `check_vma`, `jax.shard_map` tracks along which mesh axes each array varies, and a
loop may not begin with a constant and end with an array that varies. A function that
does not communicate may ignore this: its results vary along the axes along which any
argument varies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the mesh axes along which any array varies, inside a `jax.shard_map` with
    `check_vma`. Empty elsewhere."""
    kinds = (
        getattr(jax.typeof(x), "manual_axis_type", None) for x in jax.tree.leaves(tree)
    )
    found = {axis for kind in kinds for axis in getattr(kind, "varying", ())}
    return tuple(sorted(found))


def unchecked(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, which has a gradient (in reverse mode) if the function
    has one. That of an array that does not vary is the sum over the devices.

    Args:
      function: a function of pytrees of arrays that does not communicate.
      *args: its arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [jnp.asarray(x) for x in leaves]
    smooth = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

    def on_leaves(*leaves: jax.Array) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    def forward(*leaves: jax.Array) -> Any:
        def with_pullback(*leaves: jax.Array) -> Any:
            def of_smooth(*some: jax.Array) -> Any:
                found = iter(some)
                both = zip(leaves, smooth, strict=True)
                return on_leaves(*(next(found) if s else x for x, s in both))

            some = [x for x, s in zip(leaves, smooth, strict=True) if s]
            return jax.vjp(of_smooth, *some)

        return _as_one(with_pullback, leaves)

    def backward(pullback: Any, changes: Any) -> tuple[jax.Array | None, ...]:
        inputs, tree = jax.tree.flatten((pullback, changes))

        def pulled(*inputs: jax.Array) -> Any:
            pullback, changes = jax.tree.unflatten(tree, inputs)
            return pullback(changes)

        slopes = iter(_as_one(pulled, inputs))
        return tuple(
            _summed(next(slopes), axes) if s else None
            for s, axes in zip(smooth, others, strict=True)
        )

    every = varying_axes(leaves)
    others = [tuple(a for a in every if a not in varying_axes(x)) for x in leaves]
    run = jax.custom_vjp(lambda *leaves: _as_one(on_leaves, leaves))
    run.defvjp(forward, backward)
    return run(*leaves)


def _summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _as_one(function: Callable[..., Any], leaves: Sequence[jax.Array]) -> Any:
    """Returns `function(*leaves)`, as one operation."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    out_tree: Any = None

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        nonlocal out_tree
        outs, out_tree = jax.tree.flatten(function(*leaves))
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
