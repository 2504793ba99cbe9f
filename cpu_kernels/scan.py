"""Arguments of the scan kernels (`src/scan_body.h`).

The kernels compute `pallas_kernels.scan.replay_tree_scan` and `replay`, with the same
axes. The state h [B, H, P, N] is updated in place; threads share the heads, and each
head's state is read and written once. The results of a node do not depend on other rows
of the batch, nor on nodes that are not its ancestors, bit for bit.
"""

from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.limits import MAX_NODES


def scan_unsupported(
    h0: jax.Array, past: Any, inputs: Any, mask: jax.Array
) -> str | None:
    """Returns why the kernel does not support these arguments of `replay_tree_scan`.

    Returns None if it does.
    """
    if not 1 <= mask.shape[-1] <= MAX_NODES:
        return f"wants 1 to {MAX_NODES} nodes, got {mask.shape[-1]}"
    return _empty(h0)


def replay_unsupported(h0: jax.Array, past: Any) -> str | None:
    """Returns why the kernel does not support these arguments of `replay`. None if it
    does."""
    if not 1 <= past.path.shape[1] <= MAX_NODES:
        return f"wants paths of 1 to {MAX_NODES} tokens, got {past.path.shape[1]}"
    return _empty(h0)


def _empty(h0: jax.Array) -> str | None:
    return f"wants a state that is not empty, got {h0.shape}" if 0 in h0.shape else None


def scan_arrays(
    h0: jax.Array, past: Any, inputs: Any, mask: jax.Array
) -> tuple[Any, ...]:
    """Converts the arrays to the kernel's dtypes, and D to [H, 1] or [H, P]."""
    D = inputs.D.astype(jnp.float32).reshape(inputs.x.shape[2], -1)
    dtype = _common_dtype(past.x, past.B, inputs.x, inputs.B, inputs.C)
    inputs = inputs._replace(C=inputs.C.astype(dtype), D=D)
    return h0, _converted(dtype, past), _converted(dtype, inputs), mask


def replay_arrays(h0: jax.Array, past: Any) -> tuple[Any, ...]:
    """Converts the arrays to the kernel's dtypes."""
    return h0, _converted(_common_dtype(past.x, past.B), past)


def _common_dtype(*arrays: jax.Array) -> Any:
    half = all(z.dtype == jnp.bfloat16 for z in arrays)
    return jnp.bfloat16 if half else jnp.float32


def _converted(dtype: Any, tokens: Any) -> Any:
    """Converts x and B to `dtype`, and the other arrays to 32 bits."""
    kinds = dict(x=dtype, B=dtype, dt=jnp.float32, a=jnp.float32)
    if hasattr(tokens, "path"):
        kinds |= dict(path=jnp.int32, length=jnp.int32)
    changed = {name: getattr(tokens, name).astype(kind) for name, kind in kinds.items()}
    return tokens._replace(**changed)
