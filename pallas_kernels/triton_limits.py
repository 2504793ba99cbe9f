"""The arguments that the Triton kernels support.

This module does not import Triton. Importing that takes 0.1 s, and only programs for
GPUs need it.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.pallas_kernels.delta import DeltaInputs, DeltaReplayed

MAX_TOKENS = 64
MIN_TILE = 16  # smallest side of a tensor core product
MISSING = "this jax has no Triton backend of Pallas"


@cache
def has_triton() -> bool:
    """True if this jax has a Triton backend of Pallas. Finds its module without
    importing it."""
    return find_spec("jax.experimental.pallas.triton") is not None


def scan_unsupported(
    x: jax.Array, B: jax.Array, mask: jax.Array, path: jax.Array | None = None
) -> str | None:
    """Returns why the kernels of `triton_scan` do not support these shapes and dtypes.
    None if they do.

    Args:
      x, B, mask, path: as in `scan.replay_tree_scan`, or their shapes and dtypes.
    """
    M = 0 if path is None else path.shape[-1]
    sizes = mask.shape[-1], M, x.shape[-1], B.shape[-1]
    return _unsupported_sizes({"x": x, "B": B}, *sizes)


def delta_unsupported(
    inputs: DeltaInputs, mask: jax.Array, past: DeltaReplayed | None = None
) -> str | None:
    """Returns why the kernels of `triton_delta` do not support these shapes and dtypes.
    None if they do.

    Args:
      inputs, mask, past: as in `delta.delta_replay_scan`, or their shapes and dtypes.
    """
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    M = 0
    if past is not None:
        arrays |= {"the recorded u": past.u, "the recorded k": past.k}
        M = past.path.shape[-1]
    sizes = mask.shape[-1], M, inputs.v.shape[-1], inputs.k.shape[-1]
    return _unsupported_sizes(arrays, *sizes)


def attention_unsupported(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, mask: jax.Array
) -> str | None:
    """Returns why the kernel of `triton_attention` does not support these arguments of
    `tree_attention`.

    Returns None if it does. Only shapes and dtypes are checked.
    """
    if not has_triton():
        return MISSING
    Hq, hd = q.shape[2:]
    Hk, S = k_cache.shape[1:3]
    if k_cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"a cache of {k_cache.dtype}, neither float32 nor bfloat16"
    if v_cache.dtype != k_cache.dtype:
        return f"keys of {k_cache.dtype} but values of {v_cache.dtype}"
    if hd not in (16, 32, 64, 128, 256):
        return f"head size {hd}, not a power of two from 16 to 256"
    if Hq % Hk:
        return f"{Hq} query heads do not divide among {Hk} KV heads"
    if S == 0 or 0 in mask.shape:
        return "an empty cache, batch or tree"
    return None


def _unsupported_sizes(
    arrays: Mapping[str, Any], tokens: int, path: int, head: int, state: int
) -> str | None:
    """Returns why a kernel does not support these dtypes and sizes. None if it does.

    Args:
      arrays: inputs of the products by name, or their shapes and dtypes.
      tokens, path: T and M.
      head, state: P and N.
    """
    if not has_triton():
        return MISSING
    for name, z in arrays.items():
        if z.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {z.dtype}, neither float32 nor bfloat16"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens are more than {MAX_TOKENS}"
    if path > MAX_TOKENS:
        return f"a path of {path} tokens is longer than {MAX_TOKENS}"
    for name, size in (("head", head), ("state", state)):
        if size % MIN_TILE:
            return f"the {name} size {size} is not a multiple of {MIN_TILE}"
    return None
