"""Tensor parallelism: how the devices along a mesh's axis "model" divide a model.

Each device has a smaller model with the same layers: some heads of each mixer with
their groups, some channels of each MLP, and some rows of the vocabulary (Megatron-LM,
Shoeybi et al. 2019; for Mamba2 Dao and Gu 2024, section 8.1). The last projection of a
layer gives a partial sum on each device, so each layer needs one all-reduce.

The functions below with an argument `n` run inside `jax.shard_map` on all n devices of
the axis. With n = 1 they work without `jax.shard_map` and return their input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DATA, MODEL = "data", "model"  # mesh axes: rows of the batch, parts of the model


class Run(NamedTuple):
    """Consecutive indices of an axis that hold units of equal width, such as heads.

    Attributes:
      width: number of indices of all units together.
      units: number of units (heads, groups or channels).
      repeats: True if several devices may have the same unit. KV heads and groups
        repeat, because several heads read them.
    """

    width: int
    units: int
    repeats: bool = False

    def divides(self, n: int) -> bool:
        """True if n devices can divide the run."""
        return self.units % n == 0 or (self.repeats and n % self.units == 0)

    def part(self, i: int, n: int) -> tuple[int, int]:
        """Returns the start and the width of part i of n."""
        width = self.width // min(n, self.units)
        return i * min(n, self.units) // n * width, width


def part_slices(runs: tuple[Run, ...], i: int, n: int) -> Iterator[slice]:
    """Yields the slices of an axis that device i of n holds, one slice per `Run`.

    An axis may be a concatenation of several tensors, such as queries, keys and values.
    Each is a `Run`, and a device holds some heads of each.

    Args:
      runs: the runs of the axis, in order.
      i: index of the device.
      n: number of devices that share the axis.
    """
    begin = 0
    for run in runs:
        place, width = run.part(i, n)
        yield slice(begin + place, begin + place + width)
        begin += run.width


def run_width(runs: tuple[Run, ...]) -> int:
    """Returns the size of an axis that consists of these runs."""
    return sum(run.width for run in runs)


def part_width(runs: tuple[Run, ...], n: int) -> int:
    """Returns the size of the axis in one of n parts."""
    return sum(run.part(0, n)[1] for run in runs)


WIDTH, VOCAB = ":width", ":vocab"  # owners in `Cut.parts` that are not mixers


@dataclass(frozen=True)
class Cut:
    """The number of devices that divide each part of a model.

    Attributes:
      parts: pairs (owner, number of devices), for numbers above 1. An owner is the name
        of a mixer; `WIDTH`, the columns of the projections in MTP modules and after
        shared transformer blocks; or `VOCAB`, the embedding and the head.
    """

    parts: tuple[tuple[str, int], ...] = ()

    def of(self, owner: str) -> int:
        """Returns the number of devices that share an owner's parameters."""
        return dict(self.parts).get(owner, 1)


WHOLE = Cut()


def total(x: jax.Array, n: int) -> jax.Array:
    """Returns the sum of x over the n devices, on every device."""
    return x if n == 1 else lax.psum(x, MODEL)


def over_rows(x: jax.Array, rows: str | None) -> jax.Array:
    """Returns the sum of x over the devices that share the rows of a batch.

    Args:
      x: the device's value.
      rows: mesh axis that the rows are divided over. If None, this device has all rows.
    """
    return x if rows is None else lax.psum(x, rows)


def any_row(x: jax.Array, rows: str | None) -> jax.Array:
    """True ([] bool) if x [B] bool is True for any row of the batch, on any device."""
    return over_rows(x.any().astype(jnp.int32), rows) > 0


def least_of(x: jax.Array, rows: str | None) -> jax.Array:
    """Returns the minimum of x [] over the devices that share the rows of a batch."""
    return x if rows is None else lax.pmin(x, rows)


def gathered(x: jax.Array, n: int) -> jax.Array:
    """Concatenates x of all n devices along the last axis; every device gets the
    result."""
    if n == 1:
        return x
    return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def own(x: jax.Array, n: int) -> jax.Array:
    """Returns this device's share of the last axis of x, which is whole on every
    device."""
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
    """Finds ids in this device's part of a table whose rows n devices share.

    Args:
      ids: int32, rows of the whole table. Ids past its end count as the last one, as in
        `table[ids]`.
      rows: number of rows in this device's part.
      n: number of devices.

    Returns:
      The ids' rows in the device's part (0 for rows of other devices), and a mask that
      is True for ids of this device.
    """
    if n == 1:
        return ids, jnp.ones_like(ids, bool)
    place = jnp.minimum(ids, n * rows - 1) - lax.axis_index(MODEL) * rows
    here = (place >= 0) & (place < rows)
    return jnp.where(here, place, 0), here
