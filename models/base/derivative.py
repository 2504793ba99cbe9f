"""Functions with the derivative of another function, where their own is useless."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

Function = Callable[..., jax.Array]


def with_derivative(function: Function, other: Function) -> Function:
    """Returns a function of arrays with the derivative of another one.

    Rounding, for instance, has the derivative 0: what is left of the own derivative of
    a product that rounds its input is noise.

    Example:
      >>> jax.grad(with_derivative(jnp.round, lambda x: x))(1.75).item()
      1.0
    """
    whole = jax.custom_jvp(function)
    whole.defjvp(partial(_tangent, function, other))
    return whole


def _tangent(
    function: Function, other: Function, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    return function(*primals), jax.jvp(other, primals, tangents)[1]
