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
      >>> rounded = with_derivative(lambda x: jnp.round(x), lambda x: x)
      >>> jax.grad(rounded)(1.75).item()
      1.0
    """
    whole = jax.custom_jvp(function)
    whole.defjvp(partial(_tangent, whole, other))
    return whole


def _tangent(
    whole: Function, other: Function, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    # The value is that of `whole`, for derivatives of the derivative.
    return whole(*primals), jax.jvp(other, primals, tangents)[1]
