"""Arguments of the kernels of Mamba-1's selective scan (`src/selective_body.h`).

The kernels compute `pallas_kernels.selective.selective_replay_scan` and
`selective_replay`, with the same axes. Threads share the channels. The results of a
node do not depend on other rows of the batch, nor on nodes that are not its ancestors,
bit for bit.
"""

from typing import Any

import jax
import jax.numpy as jnp


def selective_unsupported(
    h0: jax.Array,
    past: Any,
    inputs: Any,
    parents: jax.Array,
    rows: jax.Array | None,
    **options: Any,
) -> str | None:
    """Returns why the kernel does not support these arguments of
    `selective_replay_scan`. None if it does."""
    if inputs.x.dtype != past.x.dtype:
        return f"wants x in one dtype, got {inputs.x.dtype} and {past.x.dtype}"
    if 0 in inputs.x.shape:
        return f"wants tokens, got {inputs.x.shape}"
    numbers = inputs.dt, inputs.B, inputs.C, inputs.D
    return _unsupported(h0, past, inputs.A, *numbers)


def path_unsupported(h0: jax.Array, past: Any, A: jax.Array) -> str | None:
    """Returns why the kernel does not support these arguments of `selective_replay`.
    None if it does."""
    return _unsupported(h0, past, A)


def _unsupported(h0: jax.Array, past: Any, *numbers: jax.Array) -> str | None:
    if 0 in h0.shape or 0 in past.path.shape or 0 in past.x.shape:
        return f"wants a state and a path that are not empty, got {h0.shape}"
    if past.x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants x in float32 or bfloat16, got {past.x.dtype}"
    if any(z.dtype != jnp.float32 for z in (h0, past.dt, past.B, *numbers)):
        return "wants all arrays but x in float32"
    return None
