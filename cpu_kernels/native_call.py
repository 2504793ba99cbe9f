"""A kernel where a program runs on one CPU, its definition everywhere else.

Only when a program is lowered is it known for which platform, for how many devices,
and whether it will be exported. So this is a primitive of its own: exported programs,
which another machine may run, and programs of several devices, whose arrays XLA cuts,
get the definition; where `shard_map` has cut them each device runs the kernel.
Derivatives are always the definition's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stree_jax.cpu_kernels.library import level

Function = Callable[..., Any]  # of arrays, to one or several
# The same for arrays of which some, which the second argument says, have a first axis
# more; the third is `definition`, the fourth `level`.
Batched = Callable[[Sequence[jax.Array], Sequence[bool], Function, int], Any]

_native_call = Primitive("native_call")
_native_call.multiple_results = True


def native_call(
    *args: jax.Array,
    kernel: Function,
    definition: Function,
    batched: Batched,
    level: int,
) -> list[jax.Array]:
    """`kernel(*args, level=level)` or `definition(*args)`, see above.

    Args:
      args: arrays.
      kernel: calls the compiled kernel; functions here are hashed, as programs are.
      definition: the same in JAX.
      batched: what `jax.vmap` makes of it.
      level: of `library.LEVELS`.
    """
    return _native_call.bind(
        *args, kernel=kernel, definition=definition, batched=batched, level=level
    )


@dataclass(frozen=True)
class MoreRows:
    """`Batched` of a kernel whose arrays, but for `shared` ones, have rows first.

    They become more rows of one call. The definition runs where a shared array differs
    by row, or there would be more than `most`.

    Attributes:
      kernel: as of `native_call`.
      shared: places among its arrays.
      most: rows of a call, None for any number.
    """

    kernel: Function
    shared: tuple[int, ...] = ()
    most: int | None = None

    def __call__(
        self,
        arrays: Sequence[jax.Array],
        has_axis: Sequence[bool],
        definition: Function,
        level: int,
    ) -> Any:
        size = next(z.shape[0] for z, has in zip(arrays, has_axis, strict=True) if has)

        def merged(place: int, z: jax.Array) -> jax.Array:
            if place in self.shared:
                return z
            z = z if has_axis[place] else jnp.broadcast_to(z[None], (size, *z.shape))
            return z.reshape(z.shape[0] * z.shape[1], *z.shape[2:])

        every = [merged(place, z) for place, z in enumerate(arrays)]
        too_many = self.most is not None and every[0].shape[0] > self.most
        if too_many or any(has_axis[place] for place in self.shared):
            axes = [0 if has else None for has in has_axis]
            return jax.vmap(definition, axes)(*arrays)
        outs = native_call(
            *every,
            kernel=self.kernel,
            definition=definition,
            batched=self,
            level=level,
        )
        return [z.reshape(size, z.shape[0] // size, *z.shape[1:]) for z in outs]


def called(
    *args: jax.Array,
    kernel: Function,
    definition: Function,
    shared: tuple[int, ...] = (),
    fits: bool = True,
) -> list[jax.Array]:
    """`native_call` of arrays that have rows first, or the definition's arrays where no
    kernel is to run or these do not fit it.

    Args:
      shared: as of `MoreRows`.
    """
    allowed = level()
    if allowed is None or not fits:
        return jax.tree.leaves(definition(*args))
    return native_call(
        *args,
        kernel=kernel,
        definition=definition,
        batched=MoreRows(kernel, shared),
        level=allowed,
    )


def counts(live: jax.Array | None) -> jax.Array:
    """How many of each row's tokens [B] there are, as kernels want it: of all, none.

    Of rows [B, T, ...], only what stands before is computed. What is left behind it is
    not even written: whoever mixes rows leaves it out.
    """
    return jnp.zeros((0,), jnp.int32) if live is None else live


def _kernel(*args: Any, kernel: Function, level: int, **_: Any) -> list[jax.Array]:
    return jax.tree.leaves(kernel(*args, level=level))


def _definition(*args: Any, definition: Function, **_: Any) -> list[jax.Array]:
    return jax.tree.leaves(definition(*args))


@cache
def _program(**params: Any) -> Callable[..., list[jax.Array]]:
    return jax.jit(partial(_native_call.bind, **params))


@_native_call.def_impl
def _run(*args: Any, **params: Any) -> list[jax.Array]:
    with jax.disable_jit(False):  # a kernel is called by programs alone
        return _program(**params)(*args)


@_native_call.def_abstract_eval
def _shapes(*args: Any, kernel: Function, level: int, **_: Any) -> list[Any]:
    return _shapes_of(
        kernel, level, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)
    )


@cache
def _shapes_of(kernel: Function, level: int, *given: jax.ShapeDtypeStruct) -> list[Any]:
    """As the kernel says: a definition takes longer to trace."""
    outs = jax.eval_shape(partial(_kernel, kernel=kernel, level=level), *given)
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in outs]


def _lower_on_cpu(ctx: Any, *args: Any, **params: Any) -> Any:
    # Where a later jax keeps these elsewhere, the definition runs.
    module = ctx.module_context
    alone = _on_one_device(module.axis_context)
    how = getattr(module, "lowering_parameters", None)
    runs_here = alone and not getattr(how, "for_export", True)
    function = _kernel if runs_here else _definition
    return mlir.lower_fun(function, multiple_results=True)(ctx, *args, **params)


def _on_one_device(context: Any) -> bool:
    """Whether arrays are one device's: of a program of one, or inside `shard_map`."""
    if getattr(context, "num_devices", None) == 1:
        return True
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(mesh.axis_names) == set(context.manual_axes)


def _derivative(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = _native_call.bind(*primals, **params)
    zeros = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    _, changes = jax.jvp(
        lambda *args: _definition(*args, **params), tuple(primals), zeros
    )
    return outs, list(changes)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    has_axis = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(arg, dim, 0) if has else arg
        for arg, dim, has in zip(args, dims, has_axis, strict=True)
    ]
    ways = params["definition"], params["level"]
    outs = jax.tree.leaves(params["batched"](moved, has_axis, *ways))
    return outs, [0] * len(outs)


mlir.register_lowering(_native_call, mlir.lower_fun(_definition, multiple_results=True))
mlir.register_lowering(_native_call, _lower_on_cpu, platform="cpu")
ad.primitive_jvps[_native_call] = _derivative
batching.primitive_batchers[_native_call] = _batch
