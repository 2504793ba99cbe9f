"""Sizes of programs: few of them, so that few are compiled."""

from stree_jax.models import PREFILL_CHUNK

PAST_STEP = 512  # tokens: a conversation grows from turn to turn, in one program


def bucket(n: int, step: int = PREFILL_CHUNK) -> int:
    """n rounded up so that few sizes exist, and with them few compiled programs.

    Up to 8 steps a multiple of the step, up to 16 of twice the step, and so on.
    """
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step
