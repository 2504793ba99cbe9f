"""Which of an op's implementations runs."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
from jax import lax

Implementation = Literal["xla", "triton", "mosaic_gpu"]
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
    """A Pallas kernel for CUDA, and why it cannot take these arguments, or None."""

    function: Callable[..., Any]
    unsupported: str | None


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
        first kernel that takes these arguments where the program is compiled for CUDA,
        the definition everywhere else. Gradients are those of the definition.
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
    usable = [k.function for k in kernels.values() if k.unsupported is None]
    if not usable:
        return reference(*args)
    return _by_platform(reference, usable[0], *args)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_platform(reference: Callable, kernel: Callable, *args: Any) -> Any:
    return lax.platform_dependent(*args, cuda=kernel, default=reference)


def _forward(reference: Callable, kernel: Callable, *args: Any) -> tuple[Any, Any]:
    return _by_platform(reference, kernel, *args), args


def _backward(reference: Callable, kernel: Callable, args: Any, given: Any) -> Any:
    return jax.vjp(reference, *args)[1](given)


_by_platform.defvjp(_forward, _backward)
