"""How a model is cut into parts, one for each device of a mesh's axis "model".

A part is a smaller model with the same layers: some heads of each mixer with their
groups, some channels of each MLP, some rows of the vocabulary (Megatron-LM, Shoeybi et
al. 2019; for Mamba2 Dao and Gu 2024, section 8.1). The last product of a layer gives a
summand in each part, so there is one sum over the parts a layer.

The functions below with an argument `n` run on every device of the axis at once, inside
`jax.shard_map`; with n = 1 there is no axis, and they do nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DATA, MODEL = "data", "model"  # axes of a mesh: rows of a batch, parts of a model


class Run(NamedTuple):
    """Consecutive places of an axis, of some units of equal width each.

    Attributes:
      width: places, of all units.
      units: heads, groups or channels.
      repeats: whether a unit may be in several parts: heads of keys and values, and
        groups, which several heads read.
    """

    width: int
    units: int
    repeats: bool = False

    def divides(self, n: int) -> bool:
        """Whether there are n parts of it."""
        return self.units % n == 0 or (self.repeats and n % self.units == 0)

    def part(self, i: int, n: int) -> tuple[int, int]:
        """Where part i of n begins, and how wide it is."""
        width = self.width // min(n, self.units)
        return i * min(n, self.units) // n * width, width


def part_slices(runs: tuple[Run, ...], i: int, n: int) -> Iterator[slice]:
    """The places of an axis that part i of n has, run after run."""
    begin = 0
    for run in runs:
        place, width = run.part(i, n)
        yield slice(begin + place, begin + place + width)
        begin += run.width


def run_width(runs: tuple[Run, ...]) -> int:
    """How many places an axis has."""
    return sum(run.width for run in runs)


def part_width(runs: tuple[Run, ...], n: int) -> int:
    """How many places of an axis a part of n has."""
    return sum(run.part(0, n)[1] for run in runs)


WIDTH, VOCAB = ":width", ":vocab"  # of `Cut`, beside the names of mixers


@dataclass(frozen=True)
class Cut:
    """Over how many devices the parts of a model are divided.

    Attributes:
      parts: pairs of an owner and its number of devices, where that is above 1. Owners
        are the names of mixers; `WIDTH`, the columns of what reads two residual streams
        side by side; and `VOCAB`, the embedding and the head.
    """

    parts: tuple[tuple[str, int], ...] = ()

    def of(self, owner: str) -> int:
        """Returns the number of devices that share what an owner has."""
        return dict(self.parts).get(owner, 1)


WHOLE = Cut()


def total(x: jax.Array, n: int) -> jax.Array:
    """The sum of all parts' summands, in every part."""
    return x if n == 1 else lax.psum(x, MODEL)


def over_rows(x: jax.Array, rows: str | None) -> jax.Array:
    """The sum of all devices' sums over their rows of a batch.

    Args:
      rows: the axis of a mesh that rows are spread over; None: all rows are here.
    """
    return x if rows is None else lax.psum(x, rows)


def any_row(x: jax.Array, rows: str | None) -> jax.Array:
    """Whether any row of the batch is marked, of x [B] bool."""
    return over_rows(x.any().astype(jnp.int32), rows) > 0


def least_of(x: jax.Array, rows: str | None) -> jax.Array:
    """The least of all devices' least x [] of their rows of a batch."""
    return x if rows is None else lax.pmin(x, rows)


def gathered(x: jax.Array, n: int) -> jax.Array:
    """All parts' last axes, one behind the other, in every part."""
    if n == 1:
        return x
    return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def own(x: jax.Array, n: int) -> jax.Array:
    """What a part has of a last axis that all parts have whole."""
    if n == 1:
        return x
    width = x.shape[-1] // n
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * width, width, x.ndim - 1)


def mean_of_neighbours(x: jax.Array, n: int) -> jax.Array:
    """The mean over the n neighbouring parts that a part is one of."""
    if n == 1:
        return x
    every = lax.all_gather(x, MODEL)
    first = lax.axis_index(MODEL) // n * n
    return lax.dynamic_slice_in_dim(every, first, n).mean(axis=0)


def own_rows(ids: jax.Array, rows: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Where ids of a table of n parts are among a part's own `rows`, and whether they
    are; an id behind the table is its last one, as in `table[ids]`."""
    if n == 1:
        return ids, jnp.ones_like(ids, bool)
    place = jnp.minimum(ids, n * rows - 1) - lax.axis_index(MODEL) * rows
    here = (place >= 0) & (place < rows)
    return jnp.where(here, place, 0), here
