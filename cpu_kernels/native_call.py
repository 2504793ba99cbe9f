"""A kernel where a program runs on one CPU, its definition everywhere else.

Exported programs, which another machine may run, and programs of several devices, whose
arrays XLA cuts, get the definition; where `shard_map` has cut them each device runs the
kernel. Derivatives are always the definition's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.lowered import Function, lowered

# The same for arrays of which some, which the second argument says, have a first axis
# more; the third is `definition`, the fourth `level`.
Batched = Callable[[Sequence[jax.Array], Sequence[bool], Function, int], Any]


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
    return lowered(*args, ways=NativeCall(kernel, definition, batched, level))


@dataclass(frozen=True)
class NativeCall:
    """The `Ways` of `native_call`, with its arguments."""

    kernel: Function
    definition: Function
    rows: Batched
    level: int

    @property
    def shaped(self) -> Function:
        return partial(self.kernel, level=self.level)

    def chosen(self, platform: str, module: Any) -> Function:
        # Where a later jax keeps these elsewhere, the definition runs.
        how = getattr(module, "lowering_parameters", None)
        alone = platform == "cpu" and _on_one_device(module.axis_context)
        runs_here = alone and not getattr(how, "for_export", True)
        return self.shaped if runs_here else self.definition

    def batched(
        self, arrays: Sequence[jax.Array], has_axis: Sequence[bool]
    ) -> list[jax.Array]:
        return jax.tree.leaves(self.rows(arrays, has_axis, self.definition, self.level))


def _on_one_device(context: Any) -> bool:
    """Whether arrays are one device's: of a program of one, or inside `shard_map`."""
    if getattr(context, "num_devices", None) == 1:
        return True
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(mesh.axis_names) == set(context.manual_axes)


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
