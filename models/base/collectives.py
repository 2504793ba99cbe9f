"""Sums, gathers and slices of arrays that the devices of a group share.

The functions run inside `jax.shard_map` on all devices of the group (`base.shards`).
For a group of one they work without `jax.shard_map` and return their input.
"""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.base.shards import Group


def total(x: jax.Array, group: Group) -> jax.Array:
    """Returns the sum of x over the devices of a group, on every device."""
    return x if group.size == 1 else lax.psum(x, group.axis)


def gathered(x: jax.Array, group: Group) -> jax.Array:
    """Concatenates x of all devices of a group along the last axis; every device gets
    the result."""
    if group.size == 1:
        return x
    return lax.all_gather(x, group.axis, axis=x.ndim - 1, tiled=True)


def own(x: jax.Array, group: Group) -> jax.Array:
    """Returns this device's share of the last axis of x, which is whole on every
    device."""
    if group.size == 1:
        return x
    width = x.shape[-1] // group.size
    begin = lax.axis_index(group.axis) * width
    return lax.dynamic_slice_in_dim(x, begin, width, x.ndim - 1)


def mean_of_neighbours(x: jax.Array, group: Group) -> jax.Array:
    """Returns the mean of x over the neighbouring devices of a group, which may be
    fewer than the axis has."""
    n = group.size
    if n == 1:
        return x
    every = lax.all_gather(x, group.axis)
    first = lax.axis_index(group.axis) // n * n
    return lax.dynamic_slice_in_dim(every, first, n).mean(axis=0)


def own_rows(ids: jax.Array, rows: int, group: Group) -> tuple[jax.Array, jax.Array]:
    """Finds ids in this device's part of a table whose rows a group shares.

    Args:
      ids: int32, rows of the whole table. Ids past its end count as the last one, as in
        `table[ids]`.
      rows: number of rows in this device's part.
      group: the devices.

    Returns:
      The ids' rows in the device's part (0 for rows of other devices), and a mask that
      is True for ids of this device.
    """
    if group.size == 1:
        return ids, jnp.ones_like(ids, bool)
    last = group.size * rows - 1
    place = jnp.minimum(ids, last) - lax.axis_index(group.axis) * rows
    here = (place >= 0) & (place < rows)
    return jnp.where(here, place, 0), here
