"""Tracing what all layers of a kind do once, not once a layer."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def traced_once(function: Callable[P, R]) -> Callable[P, R]:
    """A function of pytrees that JAX traces once for arguments of the same shapes.

    Beside compiling it is tracing that a deep model's first call waits for. The trace
    is put in line wherever it is called, so that programs and the scopes of their
    operations are those of the function itself.
    """
    return jax.jit(function, inline=True)
