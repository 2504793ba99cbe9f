"""A function of arrays that is chosen, and traced, when its program is lowered.

Only then is it known for which platform a program is, for how many devices, and whether
it will be exported. `lax.platform_dependent` knows the platform as well, but traces the
functions of all platforms wherever one is called.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Function = Callable[..., Any]  # of arrays, to one or several
PLATFORMS = ("cpu", "cuda")  # that some function is for; on others definitions run


class Ways(Hashable, Protocol):
    """The ways to compute something."""

    @property
    def definition(self) -> Function:
        """What runs where nothing else does, and whose derivatives all ways have."""
        ...

    @property
    def shaped(self) -> Function:
        """One whose outputs are those of all ways: the quickest to trace."""
        ...

    def chosen(self, platform: str, module: Any) -> Function:
        """What runs on a platform, in a program of this `ModuleContext`."""
        ...

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        """What `jax.vmap` makes of it: arrays that have a first axis more, or not."""
        ...


_lowered = Primitive("lowered")
_lowered.multiple_results = True


def lowered(*args: jax.Array, ways: Ways) -> list[jax.Array]:
    """`ways` of arrays, as a list of arrays; the definition inside a `jax.shard_map`
    that checks what varies from device to device, for what JAX's own operations do."""
    if any(map(_varies, args)):
        return jax.tree.leaves(ways.definition(*args))
    return _lowered.bind(*args, ways=ways)


def _varies(x: Any) -> bool:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return bool(getattr(kind, "varying", ()))


def by_platform(*args: Any, default: Function, **functions: Function) -> Any:
    """A platform's function of `args`, or `default`; as `lax.platform_dependent`.

    Args:
      args: pytrees of arrays.
      default: the definition.
      functions: by platform, one of `PLATFORMS`; all functions give the same shapes.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, args))
    named = ((name, _OfLeaves(f, tree)) for name, f in functions.items())
    ways = ByPlatform(_OfLeaves(default, tree), tuple(named))
    outs = lowered(*leaves, ways=ways)
    return jax.tree.unflatten(_shapes_of(ways, *map(_shape, leaves))[1], outs)


@dataclass(frozen=True)
class _OfLeaves:
    """A function of the leaves of its arguments."""

    function: Function
    tree: Any

    def __call__(self, *leaves: jax.Array) -> Any:
        return self.function(*jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True)
class ByPlatform:
    """The `Ways` of `by_platform`."""

    definition: Function
    functions: tuple[tuple[str, Function], ...]

    @property
    def shaped(self) -> Function:
        return dict(self.functions).get("cpu", self.definition)

    def chosen(self, platform: str, _: Any) -> Function:
        return dict(self.functions).get(platform, self.definition)

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        axes = tuple(0 if has else None for has in has_axis)
        functions = ((name, _Mapped(f, axes)) for name, f in self.functions)
        ways = ByPlatform(_Mapped(self.definition, axes), tuple(functions))
        return lowered(*arrays, ways=ways)


@dataclass(frozen=True)
class _Mapped:
    function: Function
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Any:
        return jax.vmap(self.function, self.axes)(*arrays)


@cache
def _program(ways: Ways) -> Callable[..., list[jax.Array]]:
    return jax.jit(partial(_lowered.bind, ways=ways))


@_lowered.def_impl
def _run(*args: Any, ways: Ways) -> list[jax.Array]:
    with jax.disable_jit(False):  # it is chosen for programs alone
        return _program(ways)(*args)


@_lowered.def_abstract_eval
def _shapes(*args: Any, ways: Ways) -> list[Any]:
    return _shapes_of(ways, *map(_shape, args))[0]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


@cache
def _shapes_of(ways: Ways, *given: jax.ShapeDtypeStruct) -> tuple[list[Any], Any]:
    """Outputs' shapes, and the tree that they are leaves of."""
    outs, tree = jax.tree.flatten(jax.eval_shape(ways.shaped, *given))
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in outs], tree


def _lower(platform: str, ctx: Any, *args: Any, ways: Ways) -> Any:
    function = ways.chosen(platform, ctx.module_context)

    def flat(*args: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*args))

    return mlir.lower_fun(flat, multiple_results=True)(ctx, *args)


def _derivative(primals: Any, tangents: Any, *, ways: Ways) -> Any:
    outs = _lowered.bind(*primals, ways=ways)
    zeros = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    _, changes = jax.jvp(
        lambda *args: jax.tree.leaves(ways.definition(*args)), tuple(primals), zeros
    )
    return outs, changes


def _batch(args: Any, dims: Any, *, ways: Ways) -> Any:
    has_axis = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(arg, dim, 0) if has else arg
        for arg, dim, has in zip(args, dims, has_axis, strict=True)
    ]
    outs = jax.tree.leaves(ways.batched(moved, has_axis))
    return outs, [0] * len(outs)


mlir.register_lowering(_lowered, partial(_lower, "default"))
for _platform in PLATFORMS:
    mlir.register_lowering(_lowered, partial(_lower, _platform), platform=_platform)
ad.primitive_jvps[_lowered] = _derivative
batching.primitive_batchers[_lowered] = _batch
