"""Rounds array sizes, so that few different programs are compiled, and computes the
capacity of KV caches. Imports no jax."""

from typing import Any

from stree_jax.cpu_kernels import symbolic_size
from stree_jax.models import PREFILL_CHUNK, chunk_of, whole_blocks

# Maximum tokens of a text. No model supports longer ones, and indices into the buffers
# fit in int32.
MOST_TOKENS = 2**24
PAST_STEP = 512  # tokens; a growing conversation reuses one program


def bucket(n: int, step: int = PREFILL_CHUNK) -> int:
    """Rounds n up, so that few sizes exist and few programs are compiled.

    Sizes up to 8 steps are multiples of the step, sizes up to 16 steps multiples of two
    steps, and so on.
    """
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step


def cache_capacity(
    text_tokens: int, max_new_tokens: int, depth: int, *, resumed: bool = False
) -> int:
    """Returns the number of KV cache rows that a generation needs.

    The cache needs more rows than the text has tokens. Prefill writes whole chunks of
    tokens, padding included. A replay always writes `depth` + 1 rows, although only
    those of accepted tokens are valid. The number is rounded up to whole blocks of the
    attention kernel, so that the output is bitwise independent of the capacity.

    Args:
      text_tokens: tokens of the prompt.
      max_new_tokens: maximum tokens of the output.
      depth: depth of the deepest tree.
      resumed: True if the generation continues a cached state, whose length need not be
        a multiple of a chunk.
    """
    chunk = chunk_of(text_tokens)
    most: Any = max
    if symbolic_size(text_tokens):
        from jax.core import max_dim as most
    chunks = -(-most(text_tokens - 1, 1) // chunk) + resumed
    return whole_blocks(chunks * chunk + max_new_tokens + depth + 2)
