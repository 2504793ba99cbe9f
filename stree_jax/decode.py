"""Algorithm 1 of STree as one `lax.while_loop`, and the functions around it.

while text is wanted:
    draft a tree below the last token
    replay the last accepted path, then verify the tree in one pass
    accept a path and one more token
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax import accept, draft
from stree_jax.checkpoint import Model
from stree_jax.models import (
    Pending,
    State,
    forward_hidden,
    init_records,
    init_state,
    logits_of,
    param_dtype,
    prefill,
)
from stree_jax.tree import Tree, tree_layout

RUNNING, STOPPED, OUT_OF_LENGTH = 0, 1, 2  # values of `Decoding.finish`
PREFILL_CHUNK = 64


@struct.dataclass
class Decoding:
    """A batch in the middle of being decoded; all of it lives on the device.

    Attributes:
      state: the target's, up to (not including) `pending`.
      pending: the last accepted path, replayed at the start of the next step.
      drafter: the drafter's state, or None.
      fresh: [B, M + 1] int32, text the drafter has not read; its last token (at
        `count` - 1) is the one the target reads next, the root of the next tree.
      count: [B] int32.
      tokens: [B, max_new_tokens] int32, the output so far, padded with 0.
      length: [B] int32, valid tokens in it.
      limit: [B] int32, most tokens wanted.
      stop_tokens: [n] int32, tokens that end a row (they are part of the output).
      finish: [B] int32, RUNNING, STOPPED or OUT_OF_LENGTH.
      calls: [B] int32, target calls made while the row was running.
      gained: [B, M + 2] int32, how often a call gained 0 .. M + 1 tokens.
      margin: [B] float32, smallest gap between the two best logits of any choice.
    """

    state: State
    pending: Pending
    drafter: State | None
    fresh: jax.Array
    count: jax.Array
    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    stop_tokens: jax.Array
    finish: jax.Array
    calls: jax.Array
    gained: jax.Array
    margin: jax.Array


def cache_capacity(prompt_tokens: int, max_new_tokens: int, tree: Tree) -> int:
    """Attention-cache rows that a generation needs.

    A prompt fills whole prefill chunks, and a commit writes a whole path (M + 1 rows)
    of which only the accepted part counts.
    """
    chunks = -(-max(prompt_tokens - 1, 1) // PREFILL_CHUNK)
    return chunks * PREFILL_CHUNK + max_new_tokens + tree.depth + 2


def start(
    target: Model,
    drafter: Model | None,
    tree: Tree,
    prompts: jax.Array,
    lengths: jax.Array,
    limit: jax.Array,
    stop_tokens: jax.Array,
    *,
    max_new_tokens: int,
    capacity: int | None = None,
) -> Decoding:
    """Read the prompts, all but their last token, which is the first tree's root.

    Args:
      target, drafter: models; the drafter may be None (plain decoding, tree of 1).
      prompts: [B, S] int32, padded on the right.
      lengths: [B] int32, at least 1.
      limit: [B] int32, most tokens wanted, at most `max_new_tokens`.
      stop_tokens: [n] int32.
      max_new_tokens: size of the output buffer.
      capacity: rows of the attention caches, `cache_capacity` at least (default).
    """
    batch, width = prompts.shape
    M = tree.depth
    if capacity is None:
        capacity = cache_capacity(width, max_new_tokens, tree)
    pad = -width % PREFILL_CHUNK
    padded = jnp.pad(prompts, ((0, 0), (0, pad)))

    def read(model: Model) -> State:
        empty = init_state(model.config, batch, capacity, param_dtype(model.params))
        return prefill(
            model.config, model.params, empty, padded, lengths - 1, PREFILL_CHUNK
        )

    zeros = jnp.zeros((batch,), jnp.int32)
    path = jnp.zeros((batch, M + 1), jnp.int32)
    root = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)
    records = init_records(target.config, batch, tree.size, param_dtype(target.params))
    return Decoding(
        state=read(target),
        pending=Pending(records, path, zeros),
        drafter=None if drafter is None else read(drafter),
        fresh=jnp.pad(root, ((0, 0), (0, M))),
        count=zeros + 1,
        tokens=jnp.zeros((batch, max_new_tokens), jnp.int32),
        length=zeros,
        limit=limit,
        stop_tokens=stop_tokens,
        finish=jnp.where(limit > 0, RUNNING, OUT_OF_LENGTH),
        calls=zeros,
        gained=jnp.zeros((batch, M + 2), jnp.int32),
        margin=jnp.full((batch,), jnp.inf, jnp.float32),
    )


def settle(
    decoding: Decoding, emitted: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cut the emitted tokens at the first stop token and at the limit.

    Args:
      emitted: [B, M + 1] int32, accepted tokens and the bonus token.
      length: [B] int32, how many they are.

    Returns:
      the length after the cut (0 for finished rows) and the new `finish`.
    """
    running = decoding.finish == RUNNING
    stops = (emitted[..., None] == decoding.stop_tokens.reshape(1, 1, -1)).any(axis=-1)
    place = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    first_stop = jnp.where(stops, place, emitted.shape[1]).min(axis=1)
    room = decoding.limit - decoding.length
    kept = jnp.minimum(length, jnp.minimum(first_stop + 1, room))
    stopped = first_stop < kept
    finish = jnp.where(
        stopped, STOPPED, jnp.where(kept == room, OUT_OF_LENGTH, RUNNING)
    )
    return jnp.where(running, kept, 0), jnp.where(running, finish, decoding.finish)


def top2_margin(logits: jax.Array, best: jax.Array) -> jax.Array:
    """Gap [...] between the largest logit of [..., V], at `best`, and the second."""
    place = lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
    others = jnp.where(place == best[..., None], -jnp.inf, logits)
    return logits.max(axis=-1) - others.max(axis=-1)


def step(
    target: Model, drafter: Model | None, tree: Tree, decoding: Decoding
) -> Decoding:
    """One pass of the loop: draft, verify, accept."""
    d, config = decoding, target.config
    batch = d.count.shape[0]
    layout = tree_layout(tree)
    nodes = tree.nodes(batch, config.conv_taps)
    last = jnp.maximum(d.count - 1, 0)[:, None]
    tokens = jnp.take_along_axis(d.fresh, last, axis=1)  # the root
    drafter_state = None
    if drafter is not None and d.drafter is not None:
        below = tree.drafted_nodes(batch, drafter.config.conv_taps)
        tokens, drafter_state = draft.propose(
            drafter.config,
            drafter.params,
            d.drafter,
            d.fresh,
            d.count,
            tree,
            layout,
            below,
        )

    hidden, records, state = forward_hidden(
        config, target.params, d.state, tokens, nodes, pending=d.pending
    )
    logits = draft.real_logits(config, logits_of(config, target.params, hidden))
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    path, accepted, following = accept.greedy(layout, nodes, tokens, best)
    place = jnp.arange(tree.depth + 1, dtype=jnp.int32)[None]
    drafts = jnp.take_along_axis(tokens, path[:, 1:], axis=1)
    emitted = jnp.where(
        place == accepted[:, None] - 1,
        following[:, None],
        jnp.pad(drafts, ((0, 0), (0, 1))),
    )
    kept, finish = settle(d, emitted, accepted)

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    counts = place < kept[:, None]
    where_to = jnp.where(counts, d.length[:, None] + place, d.tokens.shape[1])
    on_path = jnp.take_along_axis(logits, path[..., None], axis=1)
    gaps = top2_margin(on_path, jnp.take_along_axis(best, path, axis=1))
    ran = (d.finish == RUNNING).astype(jnp.int32)
    return replace(
        d,
        state=state,
        pending=Pending(records, path, kept),
        drafter=drafter_state,
        fresh=emitted,
        count=kept,
        tokens=d.tokens.at[rows, where_to].set(emitted, mode="drop"),
        length=d.length + kept,
        finish=finish,
        calls=d.calls + ran,
        gained=d.gained.at[rows[:, 0], kept].add(ran),
        margin=jnp.minimum(d.margin, jnp.where(counts, gaps, jnp.inf).min(axis=1)),
    )


def advance(
    target: Model,
    drafter: Model | None,
    tree: Tree,
    decoding: Decoding,
    max_steps: jax.Array,
) -> Decoding:
    """Run the loop until every row has finished, or for `max_steps` more steps."""

    def unfinished(carry: tuple[jax.Array, Decoding]) -> jax.Array:
        steps, decoding = carry
        return (decoding.finish == RUNNING).any() & (steps < max_steps)

    def body(carry: tuple[jax.Array, Decoding]) -> tuple[jax.Array, Decoding]:
        steps, decoding = carry
        return steps + 1, step(target, drafter, tree, decoding)

    return lax.while_loop(unfinished, body, (jnp.int32(0), decoding))[1]


def generate_tokens(
    target: Model,
    drafter: Model | None,
    tree: Tree,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    max_new_tokens: int,
    stop_tokens: Any = None,
) -> Decoding:
    """Greedy generation as one pure function, to be used inside `jax.jit`.

    Args:
      target: verifies; its own greedy text is what comes out.
      drafter: proposes, or None for plain decoding (then `tree` is `chain(0)`).
      tree: the drafted tree.
      prompts: [B, S] int32, padded on the right.
      lengths: [B] int32, at least 1.
      max_new_tokens: most tokens per row, static.
      stop_tokens: [n] ints; None: the target's own.

    Returns:
      the finished `Decoding`: `.tokens` [B, max_new_tokens], `.length` [B], `.calls`.
    """
    if stop_tokens is None:
        stop_tokens = target.config.stop_tokens
    batch = prompts.shape[0]
    decoding = start(
        target,
        drafter,
        tree,
        prompts,
        lengths,
        jnp.full((batch,), max_new_tokens, jnp.int32),
        jnp.asarray(stop_tokens, jnp.int32),
        max_new_tokens=max_new_tokens,
    )
    return advance(target, drafter, tree, decoding, jnp.int32(2**31 - 1))


start_jit = partial(jax.jit, static_argnames=("max_new_tokens", "capacity"))(start)
advance_jit = partial(jax.jit, donate_argnames=("decoding",))(advance)
