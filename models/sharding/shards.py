"""Tensor parallelism: how the devices of a mesh's axis "model" divide a model.

Each device has a smaller model with the same layers: some heads of each mixer with
their groups, some channels of each MLP, some rows of the vocabulary (Megatron-LM,
Shoeybi et al. 2019; for Mamba2 Dao and Gu 2024, section 8.1). The last product of a
layer gives a partial sum on each device, so every layer has one sum over the devices.

The functions below with an argument `n` run on every device of the axis at once, inside
`jax.shard_map`. With n = 1 there is no axis, and they return their input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DATA, MODEL = "data", "model"  # axes of a mesh: rows of a batch, parts of a model


class Run(NamedTuple):
    """Consecutive indices of an axis that hold units of equal width.

    Attributes:
      width: indices of all units together.
      units: number of heads, groups or channels.
      repeats: True if several devices may have the same unit, as they do of key/value
        heads and of groups, which several heads read.
    """

    width: int
    units: int
    repeats: bool = False

    def divides(self, n: int) -> bool:
        """True if n devices can divide it."""
        return self.units % n == 0 or (self.repeats and n % self.units == 0)

    def part(self, i: int, n: int) -> tuple[int, int]:
        """Returns the start and the width of part i of n."""
        width = self.width // min(n, self.units)
        return i * min(n, self.units) // n * width, width


def part_slices(runs: tuple[Run, ...], i: int, n: int) -> Iterator[slice]:
    """Yields the slices of an axis that part i of n has, run after run."""
    begin = 0
    for run in runs:
        place, width = run.part(i, n)
        yield slice(begin + place, begin + place + width)
        begin += run.width


def run_width(runs: tuple[Run, ...]) -> int:
    """Returns the size of an axis."""
    return sum(run.width for run in runs)


def part_width(runs: tuple[Run, ...], n: int) -> int:
    """Returns the size of an axis in one part of n."""
    return sum(run.part(0, n)[1] for run in runs)


WIDTH, VOCAB = ":width", ":vocab"  # of `Cut`, beside the names of mixers


@dataclass(frozen=True)
class Cut:
    """The number of devices that divide each part of a model.

    Attributes:
      parts: pairs of an owner and its number of devices, where that is above 1. Owners
        are the names of mixers; `WIDTH`, the columns of products that read two vectors
        of the model's width; and `VOCAB`, the embedding and the head.
    """

    parts: tuple[tuple[str, int], ...] = ()

    def of(self, owner: str) -> int:
        """Returns the number of devices that share what an owner has."""
        return dict(self.parts).get(owner, 1)


WHOLE = Cut()


def total(x: jax.Array, n: int) -> jax.Array:
    """Returns the sum of x over the n devices, on every device."""
    return x if n == 1 else lax.psum(x, MODEL)


def over_rows(x: jax.Array, rows: str | None) -> jax.Array:
    """Returns the sum of x over the devices that share the rows of a batch.

    Args:
      rows: mesh axis that rows are spread over. If None, this device has all rows.
    """
    return x if rows is None else lax.psum(x, rows)


def any_row(x: jax.Array, rows: str | None) -> jax.Array:
    """True ([] bool) if any row of the batch is marked in x [B] bool."""
    return over_rows(x.any().astype(jnp.int32), rows) > 0


def least_of(x: jax.Array, rows: str | None) -> jax.Array:
    """Returns the smallest x [] of the devices that share the rows of a batch."""
    return x if rows is None else lax.pmin(x, rows)


def gathered(x: jax.Array, n: int) -> jax.Array:
    """Returns x with the last axes of all n devices concatenated, on every device."""
    if n == 1:
        return x
    return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def own(x: jax.Array, n: int) -> jax.Array:
    """Returns this device's share of the last axis of x, which all have whole."""
    if n == 1:
        return x
    width = x.shape[-1] // n
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * width, width, x.ndim - 1)


def mean_of_neighbours(x: jax.Array, n: int) -> jax.Array:
    """Returns the mean of x over the n neighbouring devices that share a group."""
    if n == 1:
        return x
    every = lax.all_gather(x, MODEL)
    first = lax.axis_index(MODEL) // n * n
    return lax.dynamic_slice_in_dim(every, first, n).mean(axis=0)


def own_rows(ids: jax.Array, rows: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Finds ids among this device's rows of a table that n devices share.

    Returns:
      the places of the ids among the device's `rows`, 0 for ids of other devices, and a
      mask that is True where this device has the id. An id past the end of the table
      counts as the last one, as in `table[ids]`.
    """
    if n == 1:
        return ids, jnp.ones_like(ids, bool)
    place = jnp.minimum(ids, n * rows - 1) - lax.axis_index(MODEL) * rows
    here = (place >= 0) & (place < rows)
    return jnp.where(here, place, 0), here
