"""Lookup of rows in a table that devices may share."""

from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models.base.collectives import own_rows, total
from stree_jax.models.base.shards import Group
from stree_jax.models.weights.parameters import as_weight


def embedded(table: Any, tokens: jax.Array, group: Group) -> jax.Array:
    """Looks up the rows [B, T, d] float32 of tokens [B, T] int32.

    Args:
      table: [V, d], an array or a `Weight`; this device's rows of it.
      tokens: the tokens.
      group: the devices that share the table's rows.
    """
    # XLA:CPU has no 16-bit gather and converts to float32. Without the barrier it
    # would convert the whole table before the decoding loop and keep the copy.
    table, tokens = jax.lax.optimization_barrier((table, tokens))
    ids, here = own_rows(tokens, table.shape[0], group)
    rows = as_weight(table).rows(ids)
    if group.size > 1:
        rows = total(jnp.where(here[..., None], rows, 0.0), group)
    return rows
