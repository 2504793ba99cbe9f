"""Tracks how much of the text a draft model has read.

Letters: B rows, U size of the buffer of unread tokens, d width of the model's hidden
states.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Model, State, extend, read_text
from stree_jax.speculation.drafter import Prompts, Update


@struct.dataclass
class Reading:
    """The state of a draft model, which reads new text when it next drafts.

    Attributes:
      state: the model's state after all text except `unread`.
      unread: [B, U] int32. Tokens that the model has not read; the last valid token is
        the root of the next tree. It is empty (U = 0) right after a read.
      unread_length: [B] int32. Number of valid tokens in `unread`.
      passes: [B] int32. Forward passes of the model since the prompts were read.
      size: U between steps.
    """

    state: State
    unread: jax.Array
    unread_length: jax.Array
    passes: jax.Array
    size: int = struct.field(pytree_node=False)


def model_state(past: Any) -> State | None:
    """Returns the state of the outermost model in a drafter's cached state, which may
    itself be the model's state."""
    past = getattr(past, "reading", past)
    return getattr(past, "state", past)


def begin_reading(model: Model, prompts: Prompts, past: Any) -> Reading:
    """Prefills the prompts, except the last token of each. It implements `Drafter.init`
    for draft models.

    Args:
      model: the draft model.
      prompts: the prompts.
      past: the drafter's state that has already read a prefix, or None.
    """
    token_ids, lengths, size = prompts.token_ids, prompts.lengths, prompts.update_width
    read = model_state(past)
    state = read_text(model, token_ids, lengths, prompts.capacity, read)
    unread = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
    unread = jnp.pad(unread, ((0, 0), (0, size - 1)))
    return Reading(state, unread, jnp.ones_like(lengths), jnp.zeros_like(lengths), size)


def read_all(model: Model, reading: Reading) -> tuple[jax.Array, Reading]:
    """Feeds the unread tokens to the model.

    Returns:
      The hidden states [B, 1, d] at the last unread token of each row, and a `Reading`
      without unread tokens.
    """
    last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
    hidden, state = extend(model, reading.state, reading.unread, reading.unread_length)
    hidden = jnp.take_along_axis(hidden, last[..., None], axis=1)
    return hidden, all_read(reading, state, 1)


def all_read(reading: Reading, state: State, passes: jax.Array | int) -> Reading:
    """Returns a `Reading` without unread tokens, after the model has read them.

    Args:
      reading: the `Reading` before.
      state: the model's new state.
      passes: number of forward passes that this took.
    """
    return replace(
        reading,
        state=state,
        unread=reading.unread[:, :0],
        unread_length=jnp.zeros_like(reading.unread_length),
        passes=reading.passes + passes,
    )


def add_update(model: Model, reading: Reading, update: Update) -> Reading:
    """Appends the tokens of an update to those that the draft model has not read. It
    implements `Drafter.commit` for draft models.

    Tokens stay unread until the model drafts or the buffer is full.
    """
    batch, width = update.tokens.shape
    size = reading.size
    if reading.unread.shape[1] == 0:
        unread = jnp.pad(update.tokens, ((0, 0), (0, size - width)))
        return replace(reading, unread=unread, unread_length=update.length)

    def read(reading: Reading) -> Reading:
        after = read_all(model, reading)[1]
        return replace(after, unread=jnp.zeros_like(reading.unread))

    full = (reading.unread_length + update.length > size).any()
    reading = lax.cond(full, read, lambda reading: reading, reading)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    place = reading.unread_length[:, None] + index
    place = jnp.where(index < update.length[:, None], place, size)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return replace(
        reading,
        unread=reading.unread.at[row, place].set(update.tokens, mode="drop"),
        unread_length=reading.unread_length + update.length,
    )
