"""Rows of a table, such as an embedding, in float32: `src/rows_ffi.cc`.

XLA looks numbers of 16 bits up one by one: 8 rows of 192 take it 40 us.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.native_call import called


def table_rows(
    table: jax.Array,
    ids: jax.Array,
    *,
    definition: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """table[ids] [..., d] float32, of a table [V, d] and ids [...] int32.

    Args:
      definition: of both; what runs where no kernel can.
    """
    known = table.dtype in (jnp.float32, jnp.bfloat16) and ids.dtype == jnp.int32
    (out,) = called(
        *(table, ids),
        kernel=_call,
        definition=definition,
        shared=(0,),
        fits=known and 0 not in (table.size, ids.size),
    )
    return out


def _call(table: jax.Array, ids: jax.Array, *, level: int) -> jax.Array:
    out = jax.ShapeDtypeStruct((*ids.shape, table.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("stree_rows", out)(table, ids)
