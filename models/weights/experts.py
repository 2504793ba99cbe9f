"""The matrices of a mixture's experts in the storage of a weight format.

A mixture has E matrices [m, k], and a `Weight` could store each. They are one
pytree: a weight whose arrays have a leading axis of E experts. In plain formats it is
an array [E, m, k].
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import floats
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.weight import Stored, joined, slices, take

Product = Callable[[jax.Array, Any], jax.Array]  # rows [t, k], a matrix -> [t, m]


@struct.dataclass
class Experts(Stored):
    """The matrices [E, m, k] of experts.

    Attributes:
      stack: a `Weight` whose arrays have a leading axis of E experts.
    """

    stack: Any

    @property
    def format(self) -> Format:
        return self.stack.format

    @property
    def shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self.stack)[0].shape[0], *self.one.shape

    @property
    def one(self) -> Any:
        """The weight of one expert, with `jax.ShapeDtypeStruct`s instead of arrays."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.stack
        )

    def divides(self, places: Sequence[slice], axis: int) -> bool:
        return axis == 0 or self.one.divides(places, axis - 1)

    def unit(self, axis: int) -> int:
        return 1 if axis == 0 else self.one.unit(axis - 1)

    def take(self, places: Sequence[slice], axis: int) -> "Experts":
        if axis == 0:
            return jax.tree.map(lambda x: slices(x, places, 0, 1), self)
        each = (
            take(expert_at(self.stack, e), places, axis - 1)
            for e in range(self.shape[0])
        )
        each = (jax.tree.map(lambda x: x[None], part) for part in each)
        return Experts(jax.tree.map(lambda *parts: joined(parts, 0), *each))


register_for_export(Experts)


def abstract_experts(weight: Any, experts: int) -> Experts:
    """Returns the matrices of experts, each with the storage of an abstract weight."""
    return Experts(
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((experts, *x.shape), x.dtype), weight
        )
    )


def expert_at(stack: Any, index: Any) -> Any:
    """Returns the matrix of one expert, or the matrices of several, out of a pytree of
    arrays with a leading axis of experts."""
    return jax.tree.map(lambda x: x[index], stack)


def chosen_shape(
    rows: jax.Array, chosen: jax.Array, weight: jax.Array, *_: jax.Array
) -> Any:
    """Returns the shape [t, m] and dtype of the results of `chosen_rows`."""
    return floats(chosen.shape[0], weight.shape[1])


def chosen_rows(
    rows: jax.Array, chosen: jax.Array, stack: Any, product: Product
) -> jax.Array:
    """Computes products with the matrices of chosen experts, in plain JAX.

    Args:
      rows: [n, k].
      chosen: [n * r] int32; result i is of input row i // r and expert chosen[i].
      stack: the matrices, a pytree of arrays with a leading axis of E experts.
      product: computes rows @ matrix.T for the matrix of an expert.

    Returns:
      [n * r, m] float32.
    """
    experts = jax.tree.leaves(stack)[0].shape[0]
    repeats = chosen.shape[0] // rows.shape[0]
    if chosen.shape[0] < experts:
        each = jnp.repeat(rows, repeats, axis=0)
        some = expert_at(stack, chosen)
        return jax.vmap(lambda x, w: product(x[None], w)[0])(each, some)

    def of_expert(y: jax.Array, expert: tuple[jax.Array, Any]) -> tuple:
        number, matrix = expert
        own = jnp.repeat(product(rows, matrix), repeats, axis=0)
        return jnp.where((chosen == number)[:, None], own, y), None

    one = jax.eval_shape(product, rows, expert_at(stack, 0))
    zero = jnp.zeros((chosen.shape[0], one.shape[1]), jnp.float32)
    numbers = jnp.arange(experts, dtype=chosen.dtype)
    return lax.scan(of_expert, zero, (numbers, stack))[0]
