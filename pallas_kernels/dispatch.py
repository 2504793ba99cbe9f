"""Chooses which implementation of an operation runs."""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax

from stree_jax.cpu_kernels import by_platform

Implementation = Literal["xla", "triton", "mosaic_gpu", "mosaic_tpu", "native"]
P = ParamSpec("P")
R = TypeVar("R")


def int32_inside(kernel: Callable[P, R]) -> Callable[P, R]:
    """Makes a kernel use int32 for its own integers, even with JAX_ENABLE_X64."""

    @wraps(kernel)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with jax.enable_x64(False):
            return kernel(*args, **options)

    return run


class Kernel(NamedTuple):
    """A kernel for one set of arguments.

    Attributes:
      function: the kernel; takes the same arguments as the definition.
      unsupported: why the kernel does not support the arguments. None if it does.
      platform: "cuda" or "tpu" for a kernel in Pallas, "cpu" for one of `cpu_kernels`.
    """

    function: Callable[..., Any]
    unsupported: str | None
    platform: str = "cuda"


def dispatch(
    op: str,
    implementation: Implementation | None,
    reference: Callable[..., Any],
    kernels: Mapping[str, Kernel],
    *args: Any,
) -> Any:
    """Runs an operation with a kernel or with its definition in plain JAX.

    Args:
      op: name of the operation, for messages.
      implementation: "xla" for the definition, or the name of a kernel. If None, the
        first kernel that supports the arguments on the platform for which the program
        is compiled; the definition if there is no such kernel. Gradients always come
        from the definition.
      reference: the definition.
      kernels: the kernels by name, the preferred one first.
      *args: arguments of the operation: arrays, pytrees of arrays, or None.

    Raises:
      ValueError: the named implementation does not exist or does not support the
        arguments.
    """
    if implementation == "xla":
        return reference(*args)
    if implementation is not None:
        if implementation not in kernels:
            known = ", ".join(["xla", *kernels])
            raise ValueError(
                f"{op}: unknown implementation {implementation!r}; known: {known}"
            )
        kernel = kernels[implementation]
        if kernel.unsupported is not None:
            raise ValueError(f"{op}: {implementation}: {kernel.unsupported}")
        return kernel.function(*args)
    first: dict[str, Callable[..., Any]] = {}
    for kernel in kernels.values():
        if kernel.unsupported is None:
            first.setdefault(kernel.platform, kernel.function)
    if not first:
        return reference(*args)
    # The backward pass recomputes the definition instead of storing its intermediates.
    return by_platform(*args, default=_recomputed(reference), **first)


_recomputed = cache(jax.checkpoint)
