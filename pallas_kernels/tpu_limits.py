"""The arguments that the TPU kernel of the scan supports, without importing Mosaic."""

from functools import cache
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from stree_jax.pallas_kernels.scan import Replayed, ScanInputs

LANES = 128
MAX_TOKENS = 64
BLOCK_BYTES = 1 << 20  # of the state that a program reads; two are read, two written


@cache
def has_mosaic() -> bool:
    """True if this jax has Pallas for TPUs. Finds its module without importing it."""
    return find_spec("jax.experimental.pallas.tpu") is not None


def heads_of_block(heads: int, P: int, N: int) -> int | None:
    """Returns how many of the heads of one group a program owns: as many as fit, whose
    channels fill whole lanes. None if there is no such number."""
    counts = range(min(heads, BLOCK_BYTES // (4 * P * N)), 0, -1)
    return next((n for n in counts if heads % n == 0 and n * P % LANES == 0), None)


def tpu_scan_unsupported(
    past: Replayed, inputs: ScanInputs, mask: jax.Array
) -> str | None:
    """Returns why the kernel of `tpu_scan` does not support these shapes and dtypes.
    None if it does.

    Args:
      past, inputs, mask: as in `scan.replay_tree_scan`, or their shapes and dtypes.
    """
    if not has_mosaic():
        return "this jax has no Pallas for TPUs"
    (H, P), (G, N) = inputs.x.shape[2:], inputs.B.shape[2:]
    named = {"x": inputs.x, "B": inputs.B, "C": inputs.C}
    named |= {"the recorded x": past.x, "the recorded B": past.B}
    for name, z in named.items():
        if z.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {z.dtype}, neither float32 nor bfloat16"
    for name, tokens in (("tree", inputs.x.shape[1]), ("last tree", past.x.shape[1])):
        if not 1 < tokens <= MAX_TOKENS:
            return f"a {name} of {tokens} tokens, not of 2 to {MAX_TOKENS}"
    if N % LANES:
        return f"the state size {N} is not a multiple of {LANES}"
    if P % 8 or (P % LANES and LANES % P):
        return f"heads of {P} channels, neither a divisor nor a multiple of {LANES}"
    if heads_of_block(H // G, P, N) is None:
        return f"no part of {H // G} heads of {P} channels fills {LANES} lanes in 1 MB"
    return None
