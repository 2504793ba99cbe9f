"""Tracks how much of the text a draft model has read.

Letters: B rows, U size of the buffer of unread tokens, d width of the model's hidden
states.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Model, State, extend, read_text
from stree_jax.models.base.serialization import register_for_export
from stree_jax.speculation.drafter import Prompts, Update


@register_for_export
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


Some = TypeVar("Some", bound=Reading)


def model_state(past: Any) -> State | None:
    """Returns the state of the outermost model in a drafter's cached state, which may
    itself be the model's state."""
    past = getattr(past, "reading", past)
    return getattr(past, "state", past)


def without_unread(past: Any) -> Any:
    """Returns a drafter's cached state without the buffers of unread tokens. They must
    be empty, or contain tokens that `Drafter.init` reads from the prompts."""

    def emptied(x: Any) -> Any:
        return replace(x, unread=x.unread[:, :0]) if isinstance(x, Reading) else x

    return jax.tree.map(emptied, past, is_leaf=lambda x: isinstance(x, Reading))


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
    implements `Drafter.commit` for draft models."""
    tokens, count = update.tokens, update.length
    return add_unread(reading, tokens, count, lambda r: read_all(model, r)[1])


def add_unread(
    reading: Some, new: jax.Array, count: jax.Array, read: Callable[[Some], Some]
) -> Some:
    """Appends what a step added to the text to what has not been read.

    It stays unread until the next draft, or until the buffer is full.

    Args:
      reading: the `Reading` before.
      new: [B, M + 1, ...]. What is read of each token.
      count: [B] int32. Number of valid tokens in `new`.
      read: function that reads everything.
    """
    batch, width = new.shape[:2]
    if reading.unread.shape[1] == 0:
        rows = [(0, reading.size - width), *[(0, 0)] * (new.ndim - 2)]
        unread = jnp.pad(new, [(0, 0), *rows])
        return replace(reading, unread=unread, unread_length=count)

    def is_full(reading: Some) -> jax.Array:
        return (reading.unread_length + count > reading.size).any()

    # A loop that runs at most once, because a conditional would copy the state.
    assert width <= reading.size
    reading = lax.while_loop(
        is_full, lambda r: replace(read(r), unread=r.unread), reading
    )
    index = jnp.arange(width, dtype=jnp.int32)[None]
    place = reading.unread_length[:, None] + index
    place = jnp.where(index < count[:, None], place, reading.size)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return replace(
        reading,
        unread=reading.unread.at[row, place].set(new, mode="drop"),
        unread_length=reading.unread_length + count,
    )
