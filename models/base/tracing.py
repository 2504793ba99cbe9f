"""Shares JAX traces between layers of the same kind."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def traced_once(function: Callable[P, R]) -> Callable[P, R]:
    """Makes JAX trace a function of pytrees once per set of argument shapes.

    Besides compilation, tracing dominates the time of a deep model's first call. The
    trace is inlined at every call, so the compiled program and its scope names are the
    same as without this decorator.
    """
    return jax.jit(function, inline=True)
