"""Sizes of prefill chunks and of KV caches. Imports no jax."""

from stree_jax import cpu_kernels
from stree_jax.cpu_kernels.limits import ATTENTION_BLOCK
from stree_jax.models.configs import mixer_of
from stree_jax.models.stack.config import ModelConfig

PREFILL_CHUNK = 64  # smallest chunk: tokens of one prefill pass


def chunk_of(width: int) -> int:
    """Returns the largest chunk for prefill of texts that are padded to `width` tokens.

    It is `PREFILL_CHUNK`, or 2 or 4 times that for longer texts: larger chunks read the
    weights less often.
    """
    if cpu_kernels.symbolic_size(width):
        return PREFILL_CHUNK
    return PREFILL_CHUNK * (4 if width > 1024 else 2 if width > 128 else 1)


def reading_chunk(config: ModelConfig, width: int) -> int:
    """Returns the tokens per prefill pass of a model, for texts padded to `width`.

    It is `chunk_of(width)` if every mixer gains from long chunks, else `PREFILL_CHUNK`.
    SSM scans do not gain: their temporaries grow with the tokens of a pass.
    """
    names = {name for block in config.layers for name in config.mixer_names(block)}
    long = all(mixer_of(config.mixers[name]).long_chunks for name in names)
    return chunk_of(width) if long else PREFILL_CHUNK


def whole_blocks(rows: int) -> int:
    """Rounds `rows` up to whole blocks of the CPU attention (`ATTENTION_BLOCK`)."""
    return -(-rows // ATTENTION_BLOCK) * ATTENTION_BLOCK
