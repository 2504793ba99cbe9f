"""Which of an op's implementations runs."""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax

from stree_jax.cpu_kernels import by_platform

Implementation = Literal["xla", "triton", "mosaic_gpu", "native"]
P = ParamSpec("P")
R = TypeVar("R")


def int32_inside(kernel: Callable[P, R]) -> Callable[P, R]:
    """A kernel whose own integers are int32 under JAX_ENABLE_X64, too."""

    @wraps(kernel)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with jax.enable_x64(False):
            return kernel(*args, **options)

    return run


class Kernel(NamedTuple):
    """A kernel, and why it cannot take these arguments, or None.

    `platform` is what it is for: "cuda" of Pallas's, "cpu" of `cpu_kernels`.
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
    """Run an op on arrays (and None) by its plain-JAX definition or by a kernel.

    Args:
      op: name, for messages.
      implementation: "xla" for the definition, the name of a kernel, or None: the
        first kernel for the platform that the program is compiled for which takes these
        arguments, or the definition. Gradients are those of the definition.
      reference: the definition.
      kernels: by name, the preferred one first.

    Raises:
      ValueError: the named implementation does not exist or cannot take the arguments.
    """
    if implementation == "xla":
        return reference(*args)
    if implementation is not None:
        if implementation not in kernels:
            known = ", ".join(["xla", *kernels])
            raise ValueError(
                f"{op}: no implementation {implementation!r}; known: {known}"
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
    # The backward pass computes the definition again, keeping nothing of it meanwhile.
    return by_platform(*args, default=_recomputed(reference), **first)


_recomputed = cache(jax.checkpoint)
