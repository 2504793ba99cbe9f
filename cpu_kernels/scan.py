"""The last path's replay and this tree's scan, the state in place: `src/scan_body.h`.

What it computes is defined by `pallas_kernels.scan.replay_tree_scan`, with its axes:
h [B, H, P, N] is read and written once, a head after another, shared by the threads. A
row of the batch, and a node and its ancestors in it, have the same bits whatever
stands beside them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.native_call import MoreRows, native_call

MOST_NODES = 64  # of a tree, and of a path that is replayed alone
PLACE_OF_D = 12  # among the arrays; the only one without an axis B


def scan_unsupported(h0: jax.Array, mask: jax.Array) -> str | None:
    """Why `replay_tree_scan` cannot take h0 [B, H, P, N] and [B, T, T], or None."""
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if not 1 <= mask.shape[-1] <= MOST_NODES:
        return f"wants 1 to {MOST_NODES} nodes, got {mask.shape[-1]}"
    if 0 in h0.shape:
        return f"wants a state that is not empty, got {h0.shape}"
    return None


def replay_unsupported(h0: jax.Array, path: jax.Array) -> str | None:
    """Why `replay` cannot take h0 [B, H, P, N] and a path [B, M], or None."""
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if not 1 <= path.shape[1] <= MOST_NODES:
        return f"wants paths of 1 to {MOST_NODES} tokens, got {path.shape[1]}"
    if 0 in h0.shape:
        return f"wants a state that is not empty, got {h0.shape}"
    return None


def replay(*arrays: jax.Array, definition: Callable[..., Any]) -> jax.Array:
    """The replayed state [B, H, P, N] float32, as a tree of no nodes leaves it.

    Args:
      arrays: h0; x, dt, a, B, path, length of the last tree: see `pallas_kernels.scan`.
      definition: of the same arrays.
    """
    allowed = level()
    if allowed is None:
        raise ValueError("replay: there are no compiled kernels")
    (h,) = native_call(
        *arrays,
        kernel=_replay,
        definition=definition,
        batched=MoreRows(_replay),
        level=allowed,
    )
    return h


def _replay(*arrays: jax.Array, level: int) -> jax.Array:
    h0, x, dt, a, B, *_ = arrays
    none = [z[:, :0] for z in (x, dt, a, B, B)]
    D, mask = jnp.zeros((h0.shape[1], 1)), jnp.zeros((h0.shape[0], 0, 0), bool)
    return _call(*arrays, *none, D, mask, level=level)[1]


def replay_tree_scan(
    *arrays: jax.Array, definition: Callable[..., Any]
) -> tuple[jax.Array, jax.Array]:
    """y [B, T, H, P] and the replayed state [B, H, P, N], float32.

    Args:
      arrays: h0; x, dt, a, B, path, length of the last tree; x, dt, a, B, C, D, mask of
        this one: see `pallas_kernels.scan`. Paths must lie within their tree.
      definition: of the same arrays.
    """
    allowed = level()
    if allowed is None:
        raise ValueError("replay_tree_scan: there are no compiled kernels")
    y, h = native_call(
        *arrays,
        kernel=_call,
        definition=definition,
        batched=MoreRows(_call, (PLACE_OF_D,)),
        level=allowed,
    )
    return y, h


def _call(*arrays: jax.Array, level: int) -> Sequence[jax.Array]:
    h0, *past, x, dt, a, B, C, D, mask = arrays
    pasts = dict(zip(("x", "dt", "a", "B", "path", "length"), past, strict=True))
    half = all(z.dtype == jnp.bfloat16 for z in (x, B, C, pasts["x"], pasts["B"]))
    wide = jnp.bfloat16 if half else jnp.float32

    def tokens(x: jax.Array, dt: jax.Array, a: jax.Array, B: jax.Array) -> list:
        steps = [dt.astype(jnp.float32), a.astype(jnp.float32)]
        return [x.astype(wide), *steps, B.astype(wide)]

    last = tokens(pasts["x"], pasts["dt"], pasts["a"], pasts["B"])
    path = [pasts[name].astype(jnp.int32) for name in ("path", "length")]
    D = D.astype(jnp.float32).reshape(x.shape[2], -1)  # [H, 1] or [H, P]
    now = [*tokens(x, dt, a, B), C.astype(wide), D, mask]
    call = jax.ffi.ffi_call(
        "stree_scan",
        [jax.ShapeDtypeStruct(z.shape, jnp.float32) for z in (x, h0)],
        input_output_aliases={0: 1},
    )
    return call(h0, *last, *path, *now, level=np.int64(level))
