"""Writing down what a step gained, in two calls: `src/record_ffi.cc`.

A few numbers a row, for which XLA takes forty operations. What they compute is defined
by `stree_jax.speculation.decoding`.

Letters: B rows, M depth, T nodes, O room for output, K trees of a menu.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.native_call import called

Definition = Callable[..., Any]


def _cut(*arrays: jax.Array, level: int) -> Sequence[jax.Array]:
    rows = jax.ShapeDtypeStruct(arrays[1].shape, jnp.int32)
    return jax.ffi.ffi_call("stree_cut", (rows, rows))(*arrays)


def cut(*arrays: jax.Array, definition: Definition) -> list[jax.Array]:
    """How many tokens [B] are kept of those that were accepted, and `finish` [B].

    Args:
      arrays: the tokens [B, M + 1]; how many were accepted, the text's length, its
        `finish` and its limit [B]; stop tokens [B, n]; all int32.
    """
    return called(*arrays, kernel=_cut, definition=definition)


WRITTEN = 7  # arrays, which become new in place


def _record(*arrays: jax.Array, level: int) -> Sequence[jax.Array]:
    outs = [jax.ShapeDtypeStruct(z.shape, z.dtype) for z in arrays[:WRITTEN]]
    places = {i: i for i in range(WRITTEN)}
    call = jax.ffi.ffi_call("stree_record", outs, input_output_aliases=places)
    return call(*arrays)


def record(*arrays: jax.Array, definition: Definition) -> list[jax.Array]:
    """A decoding's output and statistics after a step.

    Args:
      arrays: tokens [B, O] int32 and origins [B, O] uint8 of the output, roots and
        lengths [B] int32, calls by tree [B, K] and gains [B, ..] int32, margins [B]
        float32; then the step's trees [B] int32, whether rows were running [B] bool,
        the accepted tokens and path [B, M + 1] int32 and their margins [B, M + 1]
        float32, how many count [B] int32, origins of the nodes [B, T] uint8.

    Returns:
      the first seven.
    """
    return called(*arrays, kernel=_record, definition=definition)
