"""A decorator that runs a compiled kernel in place of a function's definition.

The decorated function stays a single JAX primitive until its program is lowered. Only
then are the program's platform, its number of devices, and whether it will be exported
known. `lax.platform_dependent` also chooses by platform, but it traces the functions of
all platforms at every call.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
from stree_jax.cpu_kernels.sizes import symbolic

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")
PLATFORMS = ("cpu", "cuda", "tpu")  # accepted by `by_platform`; others run the default
SYMBOLIC = "the shapes are symbolic"
SWITCHED_OFF = "the compiled kernels are missing or switched off"


def floats(*shape: int) -> Any:
    """Returns the description of a float32 array, for `outputs` of a kernel."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> Any:
    """Returns the description of an int32 array, for `outputs` of a kernel."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def like(arrays: Any) -> Any:
    """Returns the description of a pytree of arrays, for `outputs` of a kernel."""
    return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), arrays)


@dataclass(frozen=True)
class KernelSpec:
    """How a compiled kernel is called; the fields are the arguments of `cpu_kernel`."""

    target: str | Callable[..., Any]
    outputs: Callable[..., Any]
    unsupported: Callable[..., str | bool | None]
    shared: tuple[str, ...]
    aliases: tuple[tuple[str, int | None], ...]
    attributes: Callable[..., dict[str, Any]]
    prepare: Callable[..., tuple[Any, ...]] | None


def cpu_kernel(
    target: str | Callable[..., Any],
    *,
    outputs: Callable[..., Any],
    unsupported: Callable[..., str | bool | None] = lambda *_, **__: None,
    shared: Sequence[str] = (),
    aliases: Mapping[str, int | None] | None = None,
    attributes: Callable[..., dict[str, Any]] = lambda **_: {},
    prepare: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[[Callable[P, R]], "CpuKernel[P, R]"]:
    """Decorates a definition in JAX with the compiled kernel that computes the same.

    The kernel runs in programs for one CPU, and on each device inside a `shard_map`
    over all axes of its mesh. In all other cases the definition runs: on other
    platforms, in exported programs, in programs for several devices, and for arguments
    that the kernel does not support. Derivatives always come from the definition.

    Positional arguments of the definition are pytrees of arrays; keyword arguments are
    static, hashable options. The functions below are called with the same arguments;
    their arrays may be tracers or `jax.ShapeDtypeStruct`s. The kernel receives the
    arrays of all arguments in order, and an empty int32 array for each None.

    Args:
      target: name of the kernel in the library; or a function that computes the same
        in JAX with calls of other kernels. It gets the arguments of the definition.
      outputs: returns the shapes and dtypes of the results, as the definition's pytree.
      unsupported: returns why the kernel does not support the arguments (or just True),
        or a false value if it does. Under `jax.vmap` it is called again with the
        batched arrays.
      shared: arguments, or fields of arguments ("tree.rows"), that have no axis of
        rows. In all other arrays the first axis is rows, and `jax.vmap` adds rows to
        it. If `jax.vmap` maps over a shared array, the definition runs.
      aliases: arguments whose arrays are overwritten by a result of the same shape. The
        value is the index of that result, or None for all results.
      attributes: maps the options to the kernel's attributes: bool, int or float.
      prepare: converts the arguments to those that the kernel receives. If None, they
        are the same.
    """
    alias_items = tuple((aliases or {}).items())
    spec = KernelSpec(
        target, outputs, unsupported, tuple(shared), alias_items, attributes, prepare
    )
    return lambda definition: CpuKernel(definition, spec)


class CpuKernel(Generic[P, R]):
    """A function decorated by `cpu_kernel`.

    Attributes:
      definition: the original function in JAX.
      spec: the arguments of the decorator, from which the kernel's call is built.
    """

    def __init__(self, definition: Callable[P, R], spec: KernelSpec):
        update_wrapper(self, definition)
        self.definition, self.spec = definition, spec

    def unsupported(self, *args: P.args, **options: P.kwargs) -> str | None:
        """Returns why the kernel does not support these arguments. None if it does."""
        if level() is None:
            return SWITCHED_OFF
        if symbolic(args):
            return SYMBOLIC
        reason = self.spec.unsupported(*args, **options)
        return str(reason) if reason else None

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        allowed = level()
        if allowed is None or symbolic(args):
            return self.definition(*args, **options)
        if self.spec.unsupported(*args, **options):
            return self.definition(*args, **options)
        leaves, tree = jax.tree.flatten(args)
        named = tuple(sorted(options.items()))
        return _bind_choice(*leaves, choice=_Call(self, tree, named, allowed))

    @cached_property
    def names(self) -> list[str]:
        return list(signature(self.definition).parameters)

    def leaf_indices(self, tree: Any, name: str) -> list[int]:
        """Returns the indices of an argument's arrays among the arrays of all
        arguments.

        Args:
          tree: tree structure of all arguments.
          name: name of the argument, or of a field of it ("tree.rows").
        """
        indices = jax.tree.unflatten(tree, range(tree.num_leaves))
        by_name = dict.fromkeys(self.names) | dict(
            zip(self.names, indices, strict=False)  # arguments may be left out
        )
        return jax.tree.leaves(attrgetter(name)(SimpleNamespace(**by_name)))


class Choice(Hashable, Protocol):
    """A function of arrays with several interchangeable implementations."""

    @property
    def definition(self) -> Function:
        """The implementation that derivatives come from."""
        ...

    def shapes(self, *arrays: Any) -> Any:
        """Returns the results' shapes and dtypes."""
        ...

    def chosen(self, platform: str, module: Any) -> Function:
        """Returns the implementation to run.

        Args:
          platform: platform of the program.
          module: the program's `ModuleContext` in JAX's lowering.
        """
        ...

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        """Runs the function under `jax.vmap`, over the first axis of the arrays for
        which `has_axis` is True."""
        ...


@dataclass(frozen=True)
class _Call:
    """A call of a `CpuKernel`, as a function of the arrays of its arguments."""

    kernel: CpuKernel[..., Any]
    tree: Any
    options: tuple[tuple[str, Any], ...]
    level: int

    def definition(self, *leaves: jax.Array) -> Any:
        return self._applied(self.kernel.definition, leaves)

    def shapes(self, *arrays: Any) -> Any:
        return self._applied(self.kernel.spec.outputs, arrays)

    def _applied(self, function: Function, leaves: Sequence[Any]) -> Any:
        args = jax.tree.unflatten(self.tree, leaves)
        return function(*args, **dict(self.options))

    def chosen(self, platform: str, module: Any) -> Function:
        one_cpu = platform == "cpu" and _on_one_device(module.axis_context)
        runs_here = one_cpu and not _for_export(module)
        return self.compiled if runs_here else self.definition

    def compiled(self, *leaves: jax.Array) -> Sequence[jax.Array]:
        """Calls the kernel in the library."""
        spec = self.kernel.spec
        if callable(spec.target):
            return jax.tree.leaves(self._applied(spec.target, leaves))
        outs, out_tree = jax.tree.flatten(self.shapes(*leaves))
        prepare = spec.prepare or (lambda *args, **_: args)
        arrays, tree = jax.tree.flatten(
            self._applied(prepare, leaves), is_leaf=lambda z: z is None
        )
        arrays = [jnp.zeros((0,), jnp.int32) if z is None else z for z in arrays]
        results = jax.tree.unflatten(out_tree, range(len(outs)))
        aliases: dict[int, int] = {}
        for name, index in spec.aliases:
            inputs = self.kernel.leaf_indices(tree, name)
            outputs = jax.tree.leaves(results if index is None else results[index])
            pairs = zip(inputs, outputs, strict=True)
            aliases |= {i: o for i, o in pairs if arrays[i].shape == outs[o].shape}
        attributes = spec.attributes(**dict(self.options)) | {"level": self.level}
        call = jax.ffi.ffi_call(spec.target, outs, input_output_aliases=aliases)
        return call(*arrays, **{k: _scalar(v) for k, v in attributes.items()})

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        names = self.kernel.spec.shared
        shared = {
            i for name in names for i in self.kernel.leaf_indices(self.tree, name)
        }
        size = next(z.shape[0] for z, has in zip(arrays, has_axis, strict=True) if has)

        def merged(index: int, z: jax.Array) -> jax.Array:
            if index in shared:
                return z
            z = z if has_axis[index] else jnp.broadcast_to(z[None], (size, *z.shape))
            return z.reshape(z.shape[0] * z.shape[1], *z.shape[2:])

        maps_shared = any(has_axis[index] for index in shared)
        rows = [] if maps_shared else [merged(*pair) for pair in enumerate(arrays)]
        if maps_shared or self._applied(self.kernel.spec.unsupported, rows):
            axes = [0 if has else None for has in has_axis]
            return jax.vmap(self.definition, axes)(*arrays)
        outs = _choose.bind(*rows, choice=self)
        return [z.reshape(size, z.shape[0] // size, *z.shape[1:]) for z in outs]


def _scalar(value: bool | int | float) -> np.generic:
    """Converts an attribute to the kernels' types: bool, int64 or float32."""
    if isinstance(value, bool):
        return np.bool_(value)
    return np.int64(value) if isinstance(value, int) else np.float32(value)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Leaves kernels out of the programs that are exported inside the block.

    `jax.export` refuses to serialize calls of Triton kernels, because they work with
    one version of jax only. Programs that run in this process keep their kernels. A
    context manager.

    Example:
      >>> scores = jax.jit(stree_jax.score)
      >>> args = stree_jax.load("demo"), jnp.array([[60, 61, 62]])
      >>> with pallas_kernels.without_kernels():
      ...     program = jax.export.export(scores, platforms=["cpu", "cuda"])(*args)
      >>> program.platforms
      ('cpu', 'cuda')
    """
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


_LEFT_OUT = ContextVar("without_kernels", default=False)


def _for_export(module: Any) -> bool:
    """True if a program is lowered for `jax.export`, which is assumed if a later jax
    moves this parameter."""
    parameters = getattr(module, "lowering_parameters", None)
    return getattr(parameters, "for_export", True)


def _on_one_device(context: Any) -> bool:
    """True in a program for one device, and inside a `shard_map` over the whole
    mesh."""
    if getattr(context, "num_devices", None) == 1:
        return True
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(mesh.axis_names) == set(context.manual_axes)


def by_platform(*args: Any, default: Function, **functions: Function) -> Any:
    """Calls the function for the program's platform, like `lax.platform_dependent`.

    Args:
      *args: pytrees of arrays.
      default: the function for all other platforms. Derivatives come from it.
      **functions: functions by platform (one of `PLATFORMS`). All must return the same
        shapes and dtypes. That for "tpu" runs where a compiled CPU kernel would: on one
        device, or inside a `shard_map` over the whole mesh.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, args))
    named = ((name, _OnLeaves(f, tree)) for name, f in functions.items())
    choice = _ByPlatform(_OnLeaves(default, tree), tuple(named))
    return _bind_choice(*leaves, choice=choice)


@dataclass(frozen=True)
class _OnLeaves:
    """A function that takes the leaves of its arguments instead of the arguments."""

    function: Function
    tree: Any

    def __call__(self, *leaves: jax.Array) -> Any:
        return self.function(*jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True)
class _ByPlatform:
    """A call of `by_platform`, as a function of the arrays of its arguments."""

    definition: Function
    functions: tuple[tuple[str, Function], ...]

    def shapes(self, *arrays: Any) -> Any:
        # The function for CPUs is the fastest to trace.
        function = dict(self.functions).get("cpu", self.definition)
        return jax.eval_shape(function, *arrays)

    def chosen(self, platform: str, module: Any) -> Function:
        if _LEFT_OUT.get() and _for_export(module):
            return self.definition
        if platform == "tpu" and not _on_one_device(module.axis_context):
            return self.definition  # JAX cannot divide a Mosaic kernel over devices
        return dict(self.functions).get(platform, self.definition)

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> Sequence[jax.Array]:
        axes = tuple(0 if has else None for has in has_axis)
        functions = ((name, _Vmapped(f, axes)) for name, f in self.functions)
        choice = _ByPlatform(_Vmapped(self.definition, axes), tuple(functions))
        return _choose.bind(*arrays, choice=choice)


@dataclass(frozen=True)
class _Vmapped:
    function: Function
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> Any:
        return jax.vmap(self.function, self.axes)(*arrays)


_choose = Primitive("choose")
_choose.multiple_results = True


def _bind_choice(*leaves: jax.Array, choice: Choice) -> Any:
    """Calls a choice, to be resolved when the program is lowered.

    With symbolic shapes the definition runs, because kernels need known ones. It also
    runs inside a `jax.shard_map` with `check_vma`: JAX checks its operations, and
    cannot check this primitive.
    """
    leaves = tuple(map(jnp.asarray, leaves))
    if any(map(_varies, leaves)) or symbolic(leaves):
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
    with jax.disable_jit(False):  # only a compiled program has a platform
        return _program(choice)(*args)


@_choose.def_abstract_eval
def _abstract(*args: Any, choice: Choice) -> list[Any]:
    return _shapes_of(choice, *map(_shape, args))[0]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


@cache
def _shapes_of(choice: Choice, *args: jax.ShapeDtypeStruct) -> tuple[list[Any], Any]:
    """Returns the shapes of the results, and their tree structure."""
    outs, tree = jax.tree.flatten(choice.shapes(*args))
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
