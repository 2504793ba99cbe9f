"""Prefill: computes the state of a text, in chunks of tokens. Each chunk is run like a
tree that is a chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax import cpu_kernels
from stree_jax.models.layers.nodes import chain_nodes
from stree_jax.models.stack.chunks import chunk_of, reading_chunk
from stree_jax.models.stack.model import (
    Model,
    forward_hidden,
    forward_tapped,
    param_dtype,
)
from stree_jax.models.stack.network import Experts, Tapped, Taps
from stree_jax.models.stack.state import (
    Pending,
    Records,
    State,
    commit,
    grow,
    init_records,
    init_state,
)


class Observer(NamedTuple):
    """A function that sees the target's hidden states during prefill, chunk by chunk,
    and folds them into a value, such as a drafter's state.

    Attributes:
      observe: function (value, tokens [B, T] int32, hidden [B, T, d] float32, tapped,
        length [B] int32) -> value, called after each chunk of T tokens. `tokens` are
        shifted by one: `tokens[b, j]` follows token j of the chunk, and is predicted
        from `hidden[b, j]` and the residual streams in `tapped`. The first `length` of
        each row are text; the rest is padding.
      value: the initial value, a pytree.
      taps: indices of the layers whose residual streams are in `tapped`.
    """

    observe: Callable[[Any, jax.Array, jax.Array, Tapped, jax.Array], Any]
    value: Any
    taps: Taps = ()


def _ignore(value: Any, *_: Any) -> Any:
    return value


NO_OBSERVER = Observer(_ignore, None)


def extend(
    model: Model,
    state: State,
    tokens: jax.Array,
    length: jax.Array,
    previous: jax.Array | None = None,
    experts: Experts | None = None,
) -> tuple[jax.Array, State]:
    """Runs tokens through the model and commits them.

    Args:
      model: the model.
      state: the state before the tokens.
      tokens: [B, T] int32, padded on the right.
      length: [B] int32, number of valid tokens; 0 leaves a row unchanged.
      previous, experts: see `forward_hidden`.

    Returns:
      The hidden states [B, T, d] float32, and the state after the tokens.
    """
    tokens = _filled(tokens, length)
    batch, T = tokens.shape
    nodes = chain_nodes(batch, T, model.config.conv_taps, length=length)
    hidden, records, state = forward_hidden(
        model, state, tokens, nodes, previous=previous, experts=experts
    )
    path = nodes.depth  # row j of a chain is its j-th token
    return hidden, commit(state, records, path, length)


def _filled(tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Returns tokens [B, T] whose padding repeats each row's last valid token.

    A token that no text has may have an embedding of NaN.
    """
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.maximum(length[:, None] - 1, 0)
    return jnp.take_along_axis(tokens, jnp.minimum(place, last), axis=1)


def prefill(
    model: Model,
    state: State,
    tokens: jax.Array,
    length: jax.Array,
    chunk: int,
    observer: Observer = NO_OBSERVER,
) -> tuple[State, Any]:
    """Extends a state by prompts, `chunk` tokens per forward pass.

    The number of passes is computed at run time, so one compiled program serves every
    length up to S.

    Args:
      model: the model.
      state: the state before the prompts.
      tokens: [B, S] int32, padded on the right; S is a multiple of `chunk`.
      length: [B] int32, number of valid tokens.
      chunk: tokens per forward pass.
      observer: updated after each pass.

    Returns:
      The state after the prompts, and the observer's final value.
    """
    batch, config = tokens.shape[0], model.config
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    # Not before `following`, which may need the token at `length`.
    tokens = _filled(tokens, length)
    nodes = chain_nodes(batch, chunk, config.conv_taps)
    path = nodes.depth  # row j of a chain is its j-th token
    # CPU kernels skip padding, so the last chunk costs no more than its own tokens.
    skips = cpu_kernels.available() and not cpu_kernels.symbolic_size(batch)

    def one_chunk(i: jax.Array, carry: tuple[State, Records, Any]) -> tuple:
        # The pass itself commits the previous chunk before it reads the cache. Writing
        # to the cache after reading it would make XLA copy it.
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
        """Returns the number of valid tokens [B] in chunk i; 0 for chunk -1."""
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
    """Computes the state after all but the last token of each text.

    Args: see `read_observed`.
    """
    return read_observed(model, token_ids, lengths, capacity, past)[0]


def read_observed(
    model: Model,
    token_ids: jax.Array,
    lengths: jax.Array,
    capacity: int,
    past: State | None,
    observer: Observer = NO_OBSERVER,
) -> tuple[State, Any]:
    """Computes the state after all but the last token of each text, with an observer.

    Args:
      model: the model.
      token_ids: [Bp, S] int32, the texts, padded on the right.
      lengths: [Bp] int32, number of valid tokens, at least 1.
      capacity: rows of the KV caches.
      past: the cached state of a prefix of each text. If None, there is no prefix.
      observer: receives every token after the prefix's next one, including the last
        token of the text.

    Returns:
      The state, and the observer's final value.
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
    """Returns the text from position `length` on.

    Args:
      token_ids: [Bp, S] int32.
      length: [Bp] int32.

    Returns:
      [Bp, S'] int32, padded with 0; S' is S rounded up to whole chunks.
    """
    width = token_ids.shape[1]
    width += -width % chunk_of(width)
    place = length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(token_ids, place, axis=1, mode="fill", fill_value=0)
