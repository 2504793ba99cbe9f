"""Counts the bytes of plain decoding from a config, without jax. `memory.memory_of`
counts the same from the shapes of the program's arrays, for any drafter and tree."""

from stree_jax.models import Format, ModelConfig
from stree_jax.models.stack.sizes import record_bytes, state_bytes, weight_bytes
from stree_jax.sizing.parts import STOPS, BufferSizes, Memory, Temporaries
from stree_jax.sizing.passes import prefill_bytes, step_phases

INT32 = 4
NUMBERS = 2  # `Decoding.choice`, and the one node of `FixedTree.tree`
# Numbers of a row that have 4 bytes. In `Decoding`: root, length, finish, used, margin
# and two of `gained`. In `Requests`: the limit and the stop tokens. In `Pending`: path
# and length.
ROW_NUMBERS, PATH_NUMBERS = 7 + 1 + STOPS, 2


def plain_memory(config: ModelConfig, format: Format, room: BufferSizes) -> Memory:
    """Counts the bytes of greedy plain decoding.

    Args:
      config: the architecture, without MTP layers.
      format: format of the weights.
      room: the buffer sizes.
    """
    batch, capacity, dtype = room.batch, room.capacity, format.dtype
    state = state_bytes(config, batch, capacity, format)
    # Each token has its id and, in one byte, its origin.
    rows = batch * (INT32 * ROW_NUMBERS + (INT32 + 1) * room.max_new_tokens)
    phases = step_phases(config, batch, 1, 0, dtype, config.vocab_size)
    caches = state - state_bytes(config, batch, 0, format)
    return Memory(
        weights=weight_bytes(config, format),
        drafter_weights=0,
        state=state - caches,
        caches=caches,
        records=record_bytes(config, batch, 1, dtype) + INT32 * PATH_NUMBERS * batch,
        drafting=0,
        text=rows + INT32 * NUMBERS,
        temporaries=Temporaries(phases),
        reading=prefill_bytes(config, batch, capacity, dtype),
        shared=0,
    )
