"""Reading plain text into a state: chains of tokens, in chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax import cpu_kernels
from stree_jax.models.config import ModelConfig
from stree_jax.models.mixers import mixer_of
from stree_jax.models.model import (
    Model,
    Tapped,
    Taps,
    forward_hidden,
    forward_tapped,
    param_dtype,
)
from stree_jax.models.nodes import chain_nodes
from stree_jax.models.state import (
    Pending,
    Records,
    State,
    commit,
    grow,
    init_records,
    init_state,
)

PREFILL_CHUNK = 64  # tokens that a pass reads, at least


def chunk_of(width: int) -> int:
    """Most tokens that a pass reads of texts padded to `width`.

    PREFILL_CHUNK, or 2 or 4 of them: a pass over more reads the weights less often.
    """
    return PREFILL_CHUNK * (4 if width > 1024 else 2 if width > 128 else 1)


def reading_chunk(config: ModelConfig, width: int) -> int:
    """Returns `chunk_of(width)`, or PREFILL_CHUNK if a mixer gains nothing from longer
    passes, as scans do, whose temporaries grow with the tokens of a pass."""
    names = {name for block in config.layers for name in config.mixer_names(block)}
    long = all(mixer_of(config.mixers[name]).long_chunks for name in names)
    return chunk_of(width) if long else PREFILL_CHUNK


class Observer(NamedTuple):
    """A fold over the text that `prefill` reads, called after each chunk of T tokens.

    Attributes:
      observe: (value, tokens [B, T] int32, hidden [B, T, d] float32, tapped, length [B]
        int32) -> value. `tokens` are those that follow the chunk's, `hidden` and
        `tapped` the target's states that precede each of them. The first `length` of
        each row are text; the rest is padding.
      value: the pytree that the fold starts with.
      taps: layers that `tapped` has the residual stream of, see `forward_tapped`.
    """

    observe: Callable[[Any, jax.Array, jax.Array, Tapped, jax.Array], Any]
    value: Any
    taps: Taps = ()


def _ignore(value: Any, *_: Any) -> Any:
    return value


NOBODY = Observer(_ignore, None)


def extend(
    model: Model,
    state: State,
    tokens: jax.Array,
    length: jax.Array,
    previous: jax.Array | None = None,
) -> tuple[jax.Array, State]:
    """Feed plain tokens: a chain whose first `length` nodes are all accepted.

    Args:
      tokens: [B, T] int32, padded on the right.
      length: [B] int32, how many of them are real; 0 leaves a row as it was.
      previous: as of `forward_hidden`.

    Returns:
      hidden states [B, T, d] and the state after the tokens.
    """
    batch, T = tokens.shape
    nodes = chain_nodes(batch, T, model.config.conv_taps, length=length)
    hidden, records, _ = forward_hidden(model, state, tokens, nodes, previous=previous)
    path = nodes.depth  # row j of a chain is its j-th token
    return hidden, commit(state, records, path, length)


def prefill(
    model: Model,
    state: State,
    tokens: jax.Array,
    length: jax.Array,
    chunk: int,
    observer: Observer = NOBODY,
) -> tuple[State, Any]:
    """Extends a state by prompts of any length, `chunk` tokens a pass.

    The number of passes is data, so one program serves every length up to S.

    Args:
      tokens: [B, S] int32, padded on the right; S is a multiple of `chunk`.
      length: [B] int32.

    Returns:
      the state, and the observer's last value.
    """
    batch, config = tokens.shape[0], model.config
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    nodes = chain_nodes(batch, chunk, config.conv_taps)
    path = nodes.depth  # row j of a chain is its j-th token
    # A short text, or the end of one, takes no longer than its tokens where kernels
    # skip the others.
    skips = cpu_kernels.at_hand() and batch * chunk <= cpu_kernels.MOST_ROOM

    def one_chunk(i: jax.Array, carry: tuple[State, Records, Any]) -> tuple:
        # What was read before is written by the pass itself, first: a cache that is
        # written after it was read would be copied.
        state, records, value = carry
        pending = Pending(records, path, here(i - 1))
        part, then = (
            lax.dynamic_slice_in_dim(table, i * chunk, chunk, axis=1)
            for table in (tokens, following)
        )
        count = here(i) if skips else None
        read = chain_nodes(batch, chunk, config.conv_taps, length=count)
        hidden, tapped, records, state = forward_tapped(
            model, state, part, read, pending=pending, taps=observer.taps
        )
        value = observer.observe(value, then, hidden, tapped, here(i))
        return state, records, value

    def here(i: jax.Array) -> jax.Array:
        """Tokens of chunk i, of -1 none."""
        return jnp.where(i < 0, 0, jnp.clip(length - i * chunk, 0, chunk))

    passes = (jnp.max(length) + chunk - 1) // chunk
    empty = init_records(config, batch, chunk, param_dtype(model.params))
    carry = state, empty, observer.value
    state, records, value = lax.fori_loop(0, passes, one_chunk, carry)
    return commit(state, records, path, here(passes - 1)), value


def read_text(
    model: Model,
    token_ids: jax.Array,
    lengths: jax.Array,
    capacity: int,
    past: State | None = None,
) -> State:
    """Returns the state after all of each text but its last token."""
    return read_observed(model, token_ids, lengths, capacity, past)[0]


def read_observed(
    model: Model,
    token_ids: jax.Array,
    lengths: jax.Array,
    capacity: int,
    past: State | None,
    observer: Observer = NOBODY,
) -> tuple[State, Any]:
    """Returns the state after all of each text but its last token, and the observer's
    last value.

    Args:
      token_ids: [Bp, S] int32, padded on the right.
      lengths: [Bp] int32, at least 1.
      capacity: rows of the attention caches.
      past: a state that has read a beginning of each text. If None, nothing was read.
      observer: sees every token that follows one that is read now, the text's last
        token included.
    """
    if past is None:
        dtype = param_dtype(model.params)
        past = init_state(model.config, token_ids.shape[0], capacity, dtype)
    unread = unread_text(token_ids, past.length)
    amount = lengths - 1 - past.length
    past = grow(past, capacity)
    chunk = reading_chunk(model.config, token_ids.shape[1])
    return prefill(model, past, unread, amount, chunk, observer)


def unread_text(token_ids: jax.Array, length: jax.Array) -> jax.Array:
    """Text [Bp, S] from place `length` [Bp] on, in whole chunks, padded with 0."""
    width = token_ids.shape[1]
    width += -width % chunk_of(width)
    place = length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(token_ids, place, axis=1, mode="fill", fill_value=0)
