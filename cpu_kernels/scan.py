"""The last path's replay and this tree's scan, the state in place: `src/scan_body.h`.

The kernels compute `pallas_kernels.scan.replay_tree_scan` and `replay`, with its axes:
h [B, H, P, N] is read and written once, a head after another, shared by the threads. A
batch row, and a node with its ancestors, have the same bits whatever stands beside
them.
"""

from typing import Any

import jax
import jax.numpy as jnp

MOST_NODES = 64  # of a tree, and of a path that is replayed alone


def scan_unsupported(
    h0: jax.Array, past: Any, inputs: Any, mask: jax.Array
) -> str | None:
    """Returns why the kernel cannot take h0 [B, H, P, N] and [B, T, T], or None."""
    if not 1 <= mask.shape[-1] <= MOST_NODES:
        return f"wants 1 to {MOST_NODES} nodes, got {mask.shape[-1]}"
    return _empty(h0)


def replay_unsupported(h0: jax.Array, past: Any) -> str | None:
    """Returns why the kernel cannot take h0 and a path [B, M], or None."""
    if not 1 <= past.path.shape[1] <= MOST_NODES:
        return f"wants paths of 1 to {MOST_NODES} tokens, got {past.path.shape[1]}"
    return _empty(h0)


def _empty(h0: jax.Array) -> str | None:
    return f"wants a state that is not empty, got {h0.shape}" if 0 in h0.shape else None


def scan_arrays(
    h0: jax.Array, past: Any, inputs: Any, mask: jax.Array
) -> tuple[Any, ...]:
    """Returns the arrays as the kernel reads them, with D as [H, 1] or [H, P]."""
    D = inputs.D.astype(jnp.float32).reshape(inputs.x.shape[2], -1)
    dtype = _common_dtype(past.x, past.B, inputs.x, inputs.B, inputs.C)
    inputs = inputs._replace(C=inputs.C.astype(dtype), D=D)
    return h0, _read_in(dtype, past), _read_in(dtype, inputs), mask


def replay_arrays(h0: jax.Array, past: Any) -> tuple[Any, ...]:
    """Returns the arrays as the kernel reads them."""
    return h0, _read_in(_common_dtype(past.x, past.B), past)


def _common_dtype(*arrays: jax.Array) -> Any:
    half = all(z.dtype == jnp.bfloat16 for z in arrays)
    return jnp.bfloat16 if half else jnp.float32


def _read_in(dtype: Any, tokens: Any) -> Any:
    """Returns the tokens with x and B in `dtype`, the others in 32 bits."""
    kinds = dict(x=dtype, B=dtype, dt=jnp.float32, a=jnp.float32)
    if hasattr(tokens, "path"):
        kinds |= dict(path=jnp.int32, length=jnp.int32)
    changed = {name: getattr(tokens, name).astype(kind) for name, kind in kinds.items()}
    return tokens._replace(**changed)
