"""Rounds array sizes, so that few different programs are compiled."""

from stree_jax.models import PREFILL_CHUNK

PAST_STEP = 512  # tokens; a growing conversation reuses one program


def bucket(n: int, step: int = PREFILL_CHUNK) -> int:
    """Rounds n up, so that few sizes exist and few programs are compiled.

    Sizes up to 8 steps are multiples of the step, sizes up to 16 steps multiples of two
    steps, and so on.
    """
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step
