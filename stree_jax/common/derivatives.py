"""Derivatives of a function that are computed by another function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero


def with_derivatives_of(
    function: Callable[..., Any], other: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that computes `function`, or, where a derivative is taken,
    `other`, which has to compute the same values.

    Args:
      function, other: functions of pytrees of arrays, which refer to no other arrays.
    """
    run = jax.custom_jvp(function)

    @partial(run.defjvp, symbolic_zeros=True)
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(primals)
        changes = jax.tree.leaves(tangents)
        varies = [not isinstance(change, SymbolicZero) for change in changes]

        def of_varying(*some: jax.Array) -> Any:
            found = iter(some)
            both = zip(leaves, varies, strict=True)
            whole = [next(found) if v else x for x, v in both]
            return other(*jax.tree.unflatten(tree, whole))

        def chosen(values: list[Any]) -> tuple[Any, ...]:
            return tuple(x for x, v in zip(values, varies, strict=True) if v)

        return jax.jvp(of_varying, chosen(leaves), chosen(changes))

    return run
