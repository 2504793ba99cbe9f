"""A decorator that runs a compiled kernel in place of a function's definition.

The function stays one operation of JAX until its program is lowered. Only then is it
known for which platform the program is, for how many devices, and whether it will be
exported. `lax.platform_dependent` knows the platform as well, but traces the functions
of all platforms wherever one is called.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from inspect import signature
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stree_jax.cpu_kernels.library import level

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")
PLATFORMS = ("cpu", "cuda")  # that a function may be for; others run the default
SWITCHED_OFF = "there are no compiled kernels, or they are switched off"


def floats(*shape: int) -> Any:
    """Describes a float32 array, for `outputs` of a kernel."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> Any:
    """Describes an int32 array, for `outputs` of a kernel."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def like(arrays: Any) -> Any:
    """Describes a pytree of arrays, for `outputs` of a kernel."""
    return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), arrays)


@dataclass(frozen=True)
class Signature:
    """How a compiled kernel is called; the fields are the arguments of `cpu_kernel`."""

    target: str
    outputs: Callable[..., Any]
    unsupported: Callable[..., str | bool | None]
    shared: tuple[str, ...]
    aliases: tuple[tuple[str, int | None], ...]
    attributes: Callable[..., dict[str, Any]]
    prepare: Callable[..., tuple[Any, ...]] | None


def cpu_kernel(
    target: str,
    *,
    outputs: Callable[..., Any],
    unsupported: Callable[..., str | bool | None] = lambda *_, **__: None,
    shared: Sequence[str] = (),
    aliases: Mapping[str, int | None] | None = None,
    attributes: Callable[..., dict[str, Any]] = lambda **_: {},
    prepare: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[[Callable[P, R]], "CpuKernel[P, R]"]:
    """Decorates a definition in JAX with the compiled kernel that computes the same.

    The kernel runs in a program for one CPU, and on each device inside a `shard_map`
    over all axes of its mesh. Everything else runs the definition: other platforms,
    exported programs, programs for several devices, arguments that the kernel does not
    support. Derivatives are always the definition's.

    Positional arguments of the definition are pytrees of arrays, and keyword arguments
    are static options, which are hashed. The functions below are called with the same
    arguments, whose arrays may be tracers or `jax.ShapeDtypeStruct`. The kernel reads
    the arguments' arrays one after another, and an empty int32 array for each None.

    Args:
      target: name of the kernel in the library.
      outputs: returns shapes and dtypes of the results: the definition's pytree.
      unsupported: returns the reason why the kernel cannot take the arguments (or
        True, if nobody asks), or a false value. `jax.vmap` asks it again about the
        larger arrays.
      shared: arguments, or fields of them ("tree.rows"), without an axis of rows. All
        other arrays have rows as their first axis, to which `jax.vmap` adds more; the
        definition runs where a shared array differs by row.
      aliases: arguments whose arrays become those of a result of the same shape, in
        place: the place of that result, or None for all results.
      attributes: returns the kernel's attributes for the options: bool, int or float.
      prepare: returns the arguments as the kernel reads them, if it is to read others.
    """
    places = tuple((aliases or {}).items())
    how = Signature(
        target, outputs, unsupported, tuple(shared), places, attributes, prepare
    )
    return lambda definition: CpuKernel(definition, how)


class CpuKernel(Generic[P, R]):
    """A function that `cpu_kernel` decorated.

    Attributes:
      definition: the function itself.
    """

    def __init__(self, definition: Callable[P, R], how: Signature):
        update_wrapper(self, definition)
        self.definition, self.how = definition, how

    def unsupported(self, *args: P.args, **options: P.kwargs) -> str | None:
        """Returns why the kernel cannot take these arguments, or None if it can."""
        if level() is None:
            return SWITCHED_OFF
        reason = self.how.unsupported(*args, **options)
        return str(reason) if reason else None

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        allowed = level()
        if allowed is None or self.how.unsupported(*args, **options):
            return self.definition(*args, **options)
        leaves, tree = jax.tree.flatten(args)
        named = tuple(sorted(options.items()))
        return _chosen_later(*leaves, choice=_Call(self, tree, named, allowed))

    @cached_property
    def names(self) -> list[str]:
        return list(signature(self.definition).parameters)

    def places(self, tree: Any, name: str) -> list[int]:
        """Returns the places of an argument's arrays among those of all arguments."""
        numbers = jax.tree.unflatten(tree, range(tree.num_leaves))
        given = dict(zip(self.names, numbers, strict=False))
        return jax.tree.leaves(attrgetter(name)(SimpleNamespace(**given)))


class Choice(Hashable, Protocol):
    """A function of arrays with several implementations."""

    @property
    def definition(self) -> Function:
        """The implementation that derivatives are taken of."""
        ...

    def shapes(self, *arrays: Any) -> Any:
        """Returns the results' shapes and dtypes."""
        ...

    def chosen(self, platform: str, module: Any) -> Function:
        """Returns the implementation for a platform in a program, a `ModuleContext`."""
        ...

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        """Applies `jax.vmap` to the arrays that have a first axis more."""
        ...


@dataclass(frozen=True)
class _Call:
    """A call of a kernel, as a function of its arguments' arrays."""

    kernel: CpuKernel[..., Any]
    tree: Any
    options: tuple[tuple[str, Any], ...]
    level: int

    def definition(self, *leaves: jax.Array) -> Any:
        return self._applied(self.kernel.definition, leaves)

    def shapes(self, *arrays: Any) -> Any:
        return self._applied(self.kernel.how.outputs, arrays)

    def _applied(self, function: Function, leaves: Sequence[Any]) -> Any:
        args = jax.tree.unflatten(self.tree, leaves)
        return function(*args, **dict(self.options))

    def chosen(self, platform: str, module: Any) -> Function:
        # If a later jax keeps these elsewhere, the definition runs.
        how = getattr(module, "lowering_parameters", None)
        alone = platform == "cpu" and _on_one_device(module.axis_context)
        runs_here = alone and not getattr(how, "for_export", True)
        return self.compiled if runs_here else self.definition

    def compiled(self, *leaves: jax.Array) -> Sequence[jax.Array]:
        """Calls the kernel in the library."""
        how = self.kernel.how
        outs, out_tree = jax.tree.flatten(self.shapes(*leaves))
        read = how.prepare or (lambda *args, **_: args)
        arrays, tree = jax.tree.flatten(
            self._applied(read, leaves), is_leaf=lambda z: z is None
        )
        arrays = [jnp.zeros((0,), jnp.int32) if z is None else z for z in arrays]
        results = jax.tree.unflatten(out_tree, range(len(outs)))
        aliases: dict[int, int] = {}
        for name, place in how.aliases:
            become = jax.tree.leaves(results if place is None else results[place])
            pairs = zip(self.kernel.places(tree, name), become, strict=True)
            aliases |= {i: o for i, o in pairs if arrays[i].shape == outs[o].shape}
        attributes = how.attributes(**dict(self.options)) | {"level": self.level}
        call = jax.ffi.ffi_call(how.target, outs, input_output_aliases=aliases)
        return call(*arrays, **{k: _scalar(v) for k, v in attributes.items()})

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        names = self.kernel.how.shared
        shared = {i for name in names for i in self.kernel.places(self.tree, name)}
        size = next(z.shape[0] for z, has in zip(arrays, has_axis, strict=True) if has)

        def merged(place: int, z: jax.Array) -> jax.Array:
            if place in shared:
                return z
            z = z if has_axis[place] else jnp.broadcast_to(z[None], (size, *z.shape))
            return z.reshape(z.shape[0] * z.shape[1], *z.shape[2:])

        differs = any(has_axis[place] for place in shared)
        rows = [] if differs else [merged(*pair) for pair in enumerate(arrays)]
        if differs or self._applied(self.kernel.how.unsupported, rows):
            axes = [0 if has else None for has in has_axis]
            return jax.vmap(self.definition, axes)(*arrays)
        outs = _choose.bind(*rows, choice=self)
        return [z.reshape(size, z.shape[0] // size, *z.shape[1:]) for z in outs]


def _scalar(value: bool | int | float) -> np.generic:
    """Returns an attribute as the kernels declare it: bool, int64 or float32."""
    if isinstance(value, bool):
        return np.bool_(value)
    return np.int64(value) if isinstance(value, int) else np.float32(value)


def _on_one_device(context: Any) -> bool:
    """True if arrays are one device's: a program for one, or inside `shard_map`."""
    if getattr(context, "num_devices", None) == 1:
        return True
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(mesh.axis_names) == set(context.manual_axes)


def by_platform(*args: Any, default: Function, **functions: Function) -> Any:
    """Calls the function for the program's platform, as `lax.platform_dependent` does.

    Args:
      args: pytrees of arrays.
      default: the function for other platforms, of which derivatives are taken.
      functions: by platform, one of `PLATFORMS`. All return the same shapes.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, args))
    named = ((name, _OfLeaves(f, tree)) for name, f in functions.items())
    choice = _ByPlatform(_OfLeaves(default, tree), tuple(named))
    return _chosen_later(*leaves, choice=choice)


@dataclass(frozen=True)
class _OfLeaves:
    """A function of the leaves of its arguments."""

    function: Function
    tree: Any

    def __call__(self, *leaves: jax.Array) -> Any:
        return self.function(*jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True)
class _ByPlatform:
    """A call of `by_platform`, as a function of its arguments' arrays."""

    definition: Function
    functions: tuple[tuple[str, Function], ...]

    def shapes(self, *arrays: Any) -> Any:
        # The function for CPUs is the quickest to trace.
        function = dict(self.functions).get("cpu", self.definition)
        return jax.eval_shape(function, *arrays)

    def chosen(self, platform: str, _: Any) -> Function:
        return dict(self.functions).get(platform, self.definition)

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        axes = tuple(0 if has else None for has in has_axis)
        functions = ((name, _Mapped(f, axes)) for name, f in self.functions)
        choice = _ByPlatform(_Mapped(self.definition, axes), tuple(functions))
        return _choose.bind(*arrays, choice=choice)


@dataclass(frozen=True)
class _Mapped:
    function: Function
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Any:
        return jax.vmap(self.function, self.axes)(*arrays)


_choose = Primitive("choose")
_choose.multiple_results = True


def _chosen_later(*leaves: jax.Array, choice: Choice) -> Any:
    """Calls a choice. Inside a `jax.shard_map` that checks what varies from device to
    device its definition runs, as the operations of JAX are what is checked."""
    if any(map(_varies, leaves)):
        return choice.definition(*leaves)
    outs = _choose.bind(*leaves, choice=choice)
    return jax.tree.unflatten(_shapes_of(choice, *map(_shape, leaves))[1], outs)


def _varies(x: Any) -> bool:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return bool(getattr(kind, "varying", ()))


@cache
def _program(choice: Choice) -> Callable[..., list[jax.Array]]:
    return jax.jit(partial(_choose.bind, choice=choice))


@_choose.def_impl
def _run(*args: Any, choice: Choice) -> list[jax.Array]:
    with jax.disable_jit(False):  # only a program has a platform
        return _program(choice)(*args)


@_choose.def_abstract_eval
def _abstract(*args: Any, choice: Choice) -> list[Any]:
    return _shapes_of(choice, *map(_shape, args))[0]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


@cache
def _shapes_of(choice: Choice, *given: jax.ShapeDtypeStruct) -> tuple[list[Any], Any]:
    """Returns the results' shapes, and the tree that they are leaves of."""
    outs, tree = jax.tree.flatten(choice.shapes(*given))
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in outs], tree


def _lower(platform: str, ctx: Any, *args: Any, choice: Choice) -> Any:
    function = choice.chosen(platform, ctx.module_context)

    def flat(*args: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*args))

    return mlir.lower_fun(flat, multiple_results=True)(ctx, *args)


def _derivative(primals: Any, tangents: Any, *, choice: Choice) -> Any:
    outs = _choose.bind(*primals, choice=choice)
    zeros = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    _, changes = jax.jvp(
        lambda *args: jax.tree.leaves(choice.definition(*args)), tuple(primals), zeros
    )
    return outs, changes


def _batch(args: Any, dims: Any, *, choice: Choice) -> Any:
    has_axis = [dim is not None for dim in dims]
    moved = [
        jnp.moveaxis(arg, dim, 0) if has else arg
        for arg, dim, has in zip(args, dims, has_axis, strict=True)
    ]
    outs = jax.tree.leaves(choice.batched(moved, has_axis))
    return outs, [0] * len(outs)


mlir.register_lowering(_choose, partial(_lower, "default"))
for _platform in PLATFORMS:
    mlir.register_lowering(_choose, partial(_lower, _platform), platform=_platform)
ad.primitive_jvps[_choose] = _derivative
batching.primitive_batchers[_choose] = _batch
