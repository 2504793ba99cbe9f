"""Traces work that layers of a kind share once instead of once per layer."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def traced_once(function: Callable[P, R]) -> Callable[P, R]:
    """Makes JAX trace a function of pytrees once for arguments of the same shapes.

    Tracing is what the first call of a deep model waits for, beside compiling. The
    trace is inlined at every call, so that programs and the scopes of their operations
    are those of the function itself.
    """
    return jax.jit(function, inline=True)
