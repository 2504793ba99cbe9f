"""An accepted path written into what layers keep of the text: `src/commit_ffi.cc`.

Rows are copied, in place; for each layer XLA makes a program of its own of it.

Letters: B rows, T nodes, M entries of a path, K taps, C channels, Hk heads of hd
channels, S rows of a cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.native_call import called

Definition = Callable[..., Any]


def committed_window(
    window0: jax.Array,
    u: jax.Array,
    path: jax.Array,
    length: jax.Array,
    *,
    definition: Definition,
) -> jax.Array:
    """The window [B, K-1, C] of a convolution after a path: `pallas_kernels.conv`.

    Args:
      window0: [B, K-1, C], before it.
      u: [B, T, C], inputs of the nodes.
      path, length: [B, M] and [B] int32.
      definition: of the arrays.
    """
    known = u.dtype == window0.dtype and path.dtype == length.dtype == jnp.int32
    (window,) = called(
        *(window0, u, path, length),
        kernel=_window,
        definition=definition,
        fits=known and 0 not in (window0.size, u.size, path.size),
    )
    return window


def _window(*arrays: jax.Array, level: int) -> jax.Array:
    window = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return jax.ffi.ffi_call("stree_window", window, input_output_aliases={0: 0})(
        *arrays
    )


def appended_rows(
    caches: tuple[jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    path: jax.Array,
    start: jax.Array,
    *,
    definition: Definition,
) -> list[jax.Array]:
    """Caches of keys and values [B, Hk, S, hd] with a path's rows from `start` on.

    Args:
      caches: before it.
      rows: [B, T, Hk, hd], of the nodes; numbers of the caches' size, whose bits are
        what is written.
      path, start: [B, M] and [B] int32.
      definition: of the arrays, one after another.
    """
    sizes = {z.dtype.itemsize for z in (*caches, *rows)}
    fits = len(sizes) == 1 and path.dtype == start.dtype == jnp.int32
    return called(
        *(*caches, *rows, path, start),
        kernel=_append,
        definition=definition,
        fits=fits and 0 not in (*(z.size for z in (*caches, *rows)), path.size),
    )


def _append(*arrays: jax.Array, level: int) -> Sequence[jax.Array]:
    caches = [jax.ShapeDtypeStruct(z.shape, z.dtype) for z in arrays[:2]]
    places = {0: 0, 1: 1}
    call = jax.ffi.ffi_call("stree_append", caches, input_output_aliases=places)
    return call(*arrays)
