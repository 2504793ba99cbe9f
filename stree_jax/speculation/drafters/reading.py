"""How far a drafting model has read the text.

Letters: B rows, U space for unread tokens, d width of the target's hidden states.
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
    """The state of a drafting model, which reads new text when it next drafts.

    Attributes:
      state: after all text but `unread`.
      unread: [B, U] int32; the last valid token is the root of the next tree. It has no
        space (U = 0) just after everything was read.
      unread_length: [B] int32.
      passes: [B] int32, of the model since the prompts were read.
      room: U between steps.
    """

    state: State
    unread: jax.Array
    unread_length: jax.Array
    passes: jax.Array
    room: int = struct.field(pytree_node=False)


def model_state(past: Any) -> State | None:
    """Returns the state of the outermost model in a drafter's past, which may be all of
    the past."""
    past = getattr(past, "reading", past)
    return getattr(past, "state", past)


def begin_reading(model: Model, prompts: Prompts, past: Any) -> Reading:
    """Returns the reading after all of each prompt but its last token, for
    `Drafter.init` of a model."""
    token_ids, lengths, room = prompts.token_ids, prompts.lengths, prompts.update_width
    read = model_state(past)
    state = read_text(model, token_ids, lengths, prompts.capacity, read)
    unread = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
    unread = jnp.pad(unread, ((0, 0), (0, room - 1)))
    return Reading(state, unread, jnp.ones_like(lengths), jnp.zeros_like(lengths), room)


def read_all(model: Model, reading: Reading) -> tuple[jax.Array, Reading]:
    """Feeds the unread tokens to the model.

    Returns:
      hidden states [B, 1, d] after the last of them, and the reading with nothing
      unread.
    """
    last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
    hidden, state = extend(model, reading.state, reading.unread, reading.unread_length)
    hidden = jnp.take_along_axis(hidden, last[..., None], axis=1)
    return hidden, all_read(reading, state, 1)


def all_read(reading: Reading, state: State, passes: jax.Array | int) -> Reading:
    """Returns the reading with nothing unread, after `passes` more."""
    return replace(
        reading,
        state=state,
        unread=reading.unread[:, :0],
        unread_length=jnp.zeros_like(reading.unread_length),
        passes=reading.passes + passes,
    )


def add_update(model: Model, reading: Reading, update: Update) -> Reading:
    """Returns the reading after an update, for `Drafter.commit` of a model.

    Tokens wait until the model drafts, or until there is no space for them.
    """
    batch, width = update.tokens.shape
    room, waiting = reading.room, reading.unread.shape[1]
    if waiting == 0:
        unread = jnp.pad(update.tokens, ((0, 0), (0, room - width)))
        return replace(reading, unread=unread, unread_length=update.length)

    def read(reading: Reading) -> Reading:
        after = read_all(model, reading)[1]
        return replace(after, unread=jnp.zeros_like(reading.unread))

    full = (reading.unread_length + update.length > room).any()
    reading = lax.cond(full, read, lambda reading: reading, reading)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    place = reading.unread_length[:, None] + index
    place = jnp.where(index < update.length[:, None], place, room)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return replace(
        reading,
        unread=reading.unread.at[row, place].set(update.tokens, mode="drop"),
        unread_length=reading.unread_length + update.length,
    )
