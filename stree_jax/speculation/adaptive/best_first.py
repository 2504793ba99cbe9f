"""Drafting level by level, for as long as another level is worth it.

Each level holds the W continuations of the level above that are most likely to be
accepted as whole paths (EAGLE-2). Which of all of them are verified is decided later.

Letters: B rows, Q queried nodes, W nodes of a level, M most levels, C = W M candidates,
V tokens of the vocabulary, d width of hidden states, K taps of a convolution.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax import cpu_kernels
from stree_jax.models import (
    Model,
    Nodes,
    Records,
    State,
    extend,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.calibration import LOGIT_STEP, model_kind
from stree_jax.speculation.adaptive.pool import (
    MODEL_KINDS,
    PRIME,
    Pool,
    path_powers,
)
from stree_jax.speculation.drafters.lookup import History


class Worth(Protocol):
    """Whether another level is worth it."""

    def __call__(
        self, levels: jax.Array, value: jax.Array, passes: float = 1.0, /
    ) -> jax.Array:
        """Returns bool [], given how many levels there are, [] int32.

        Args:
          value: [B, W] float32, of the last level's nodes that it would go on from.
          passes: of the model that it takes.
        """
        ...


def catch_up(
    model: Model, state: State, history: History, chunk: int
) -> tuple[jax.Array, State, jax.Array]:
    """Read the text that the model has not read, `chunk` tokens a pass.

    Returns:
      hidden states [B, 1, d] after the last token, the state, and how many passes it
      took, [] int32.
    """
    batch, S = history.tokens.shape

    def behind(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        return (carry[1].length < history.length).any()

    def read(
        carry: tuple[jax.Array, State, jax.Array],
    ) -> tuple[jax.Array, State, jax.Array]:
        hidden, state, passes = carry
        place = state.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(history.tokens, jnp.minimum(place, S - 1), axis=1)
        count = jnp.clip(history.length - state.length, 0, chunk)
        out, state = extend(model, state, tokens, count)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(out, last, axis=1)
        hidden = jnp.where((count > 0)[:, None, None], last, hidden)
        return hidden, state, passes + 1

    hidden = jnp.zeros((batch, 1, model.config.d_model), jnp.float32)
    return lax.while_loop(behind, read, (hidden, state, jnp.int32(0)))


@struct.dataclass
class Grown:
    """Levels so far.

    Attributes:
      pool: of C candidates, level by level.
      nodes: of the candidates, below a context that holds the root.
      records: what the guesser keeps of the candidates, such as a model's records.
      frontier: the last level, or the root.
      levels: [] int32, how many there are.
      passes: [] int32, that they took; of the root, that which read the text.
      ahead: what was read below the frontier of the last pass, if a stage guesses;
        `nodes` and `records` have room for it behind the candidates.
    """

    pool: Pool
    nodes: Nodes
    records: Any
    frontier: "Frontier"
    levels: jax.Array
    passes: jax.Array
    ahead: "Ahead | None" = None


@struct.dataclass
class Ahead:
    """Guesses that were read with a frontier, G of them.

    Attributes:
      tokens: [B, G] int32.
      path: [B, G] uint32.
      exists: [B, G] bool.
      logits: [B, G, V] float32, after each.
    """

    tokens: jax.Array
    path: jax.Array
    exists: jax.Array
    logits: jax.Array


@struct.dataclass
class Frontier:
    """Nodes that children are sought for: the last level, or the root, once.

    Attributes:
      rows: [W] int32 among the candidates; -1 is the root.
      mask: [B, W, C] bool, candidates on the path to each, itself included.
      window: [B, W, K] int32, see `Nodes`.
      value: [B, W] float32, 0 for what is no node.
      path: [B, W] uint32.
    """

    rows: jax.Array
    mask: jax.Array
    window: jax.Array
    value: jax.Array
    path: jax.Array


def best_first(
    at_root: jax.Array,
    guesser: "Guesser",
    root: jax.Array,
    dist: Distribution,
    rule: Rule,
    probability: jax.Array,
    start: Grown,
    go_on: Callable[[Grown], jax.Array],
    least: jax.Array | float = 0.0,
) -> Grown:
    """Returns candidates below the roots [B].

    Args:
      at_root: [B, 1, >= V] float32, logits after the root.
      guesser: says what may come after the others.
      probability: [Z] float32, of nodes by kind.
      start: `nothing_grown`, of W nodes a level.
      go_on: whether another level is worth it, bool [].
      least: [] float32, nodes that are worth no more have no children, but for the best
        one of a level.
    """
    batch, W = start.frontier.value.shape
    depth = start.pool.tokens.shape[1] // W

    def add(grown: Grown, logits: jax.Array, first: bool = False) -> Grown:
        """Adds the next level, children of the frontier, from logits [B, W or 1, V]."""
        pool, d, above = grown.pool, grown.levels, grown.frontier
        Q = logits.shape[1]
        text = jnp.where(above.mask, pool.tokens[:, None], root[:, None, None])
        coupled = rule.drafting == "coupled"
        best, guess, total = dist.best(logits, d, W, text[:, :Q], drawn=coupled)
        return with_level(grown, best, guess, total, probability, first=first)

    def level(grown: Grown) -> Grown:
        above, first = grown.frontier, jnp.arange(W, dtype=jnp.int32)[None] == 0
        wanted = jnp.where((above.value > least) | first, above.value, 0.0)
        grown = replace(grown, frontier=replace(above, value=wanted))
        logits, grown = guesser(grown)
        return add(grown, logits)

    def wanted(grown: Grown) -> jax.Array:
        return (grown.levels < depth) & go_on(grown)

    first = replace(add(start, at_root, first=True), passes=jnp.int32(1))
    return lax.while_loop(wanted, level, first)


def with_level(
    grown: Grown,
    best: jax.Array,
    guess: jax.Array,
    total: jax.Array,
    probability: jax.Array,
    *,
    first: bool = False,
) -> Grown:
    """Adds the next level: the W children of the frontier of most value.

    Args:
      best, guess: [B, W or 1, W] float32 and int32, the best scores after the
        frontier's nodes, and their tokens.
      total: [B, W or 1, 1] float32, what a score is the logarithm over.
      probability: [Z] float32, of nodes by kind.
      first: whether it is `nothing_grown`, of which nothing need be made then.
    """
    pool, nodes, above, d = grown.pool, grown.nodes, grown.frontier, grown.levels
    C, W, taps = pool.tokens.shape[1], best.shape[2], nodes.window.shape[2]
    levels = _levels(C // W, taps, nodes.depth.shape[1] - C)
    said = best, guess.astype(jnp.int32), total, probability
    if first:
        tables = cpu_kernels.next_level(
            *said, levels=levels, definition=_first_level(levels)
        )
    else:
        tables = cpu_kernels.next_level(
            *said,
            d[None],
            *(above.mask, above.window, above.value, above.path),
            *(pool.tokens, pool.parents, pool.value, pool.kind, pool.path),
            *(nodes.mask, nodes.depth, nodes.window),
            levels=levels,
            definition=_next_level,
        )
    mask, window, value, path = tables[:4]
    tokens, parents, values, kinds, paths = tables[4:9]
    node_mask, depth, node_window = tables[9:]
    rows = d * W + jnp.arange(W, dtype=jnp.int32)
    return replace(
        grown,
        frontier=Frontier(rows, mask, window, value, path),
        pool=Pool(tokens, parents, values, kinds, paths, pool.guessed),
        nodes=replace(nodes, mask=node_mask, depth=depth, window=node_window),
        levels=d + 1,
    )


def _next_level(
    best: jax.Array,
    guess: jax.Array,
    total: jax.Array,
    probability: jax.Array,
    level: jax.Array,
    *before: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the arrays `before` after another level, see `cpu_kernels.next_level`."""
    mask, window, value, path, *tables = before
    (batch, W, C), taps, d = mask.shape, window.shape[2], level[0]
    shape = batch, W, W
    kind = model_kind(jnp.exp(jnp.broadcast_to(best - total, shape)))
    worth = value[..., None] * probability[kind]
    worth, chosen = lax.top_k(worth.reshape(batch, -1), W)
    parent = (chosen // W).astype(jnp.int32)

    def of(table: jax.Array) -> jax.Array:
        table = jnp.broadcast_to(table, shape).reshape(batch, -1)
        return jnp.take_along_axis(table, chosen, axis=1)

    def of_parent(table: jax.Array) -> jax.Array:
        index = parent.reshape(batch, W, *[1] * (table.ndim - 2))
        return jnp.take_along_axis(table, index, axis=1)

    token = of(guess)
    rows = d * W + jnp.arange(W, dtype=jnp.int32)
    itself = rows[:, None] == jnp.arange(C, dtype=jnp.int32)[None]  # [W, C]
    own = jnp.broadcast_to(rows[None, :, None] + taps - 1, (batch, W, 1))
    mask = of_parent(mask) | itself[None]
    window = jnp.concatenate([of_parent(window)[..., 1:], own], axis=2)
    number = (token + 1).astype(jnp.uint32) * path_powers(C // W)[d]
    path = of_parent(path) + number
    above = jnp.where(d > 0, (d - 1) * W + parent + 1, 0)

    def write(table: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.broadcast_to(new, (batch, W, *table.shape[2:]))
        return lax.dynamic_update_slice_in_dim(table, new, d * W, axis=1)

    wide = jnp.pad(mask, ((0, 0), (0, 0), (0, tables[5].shape[2] - C)))
    news = token, above, worth, of(kind), path, wide, d, window
    written = (write(table, new) for table, new in zip(tables, news, strict=True))
    return mask, window, worth, path, *written


@cache
def _first_level(levels: cpu_kernels.Levels) -> Callable[..., tuple[jax.Array, ...]]:
    def first(best: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        (batch, _, W), d = best.shape, jnp.zeros((1,), jnp.int32)
        return _next_level(best, *rest, d, *_no_levels(levels, batch, W))

    return first


def _levels(depth: int, taps: int, ahead: int) -> cpu_kernels.Levels:
    return cpu_kernels.Levels(depth, taps, ahead, PRIME, LOGIT_STEP, MODEL_KINDS)


def _no_levels(
    levels: cpu_kernels.Levels, batch: int, width: int
) -> tuple[jax.Array, ...]:
    """Returns the arrays that `_next_level` makes, with the root alone in the
    frontier."""
    tables = [jnp.zeros(z.shape, z.dtype) for z in levels.shapes(batch, width)]
    last_tokens = jnp.arange(levels.taps, dtype=jnp.int32) - 1  # the window after it
    tables[1] = jnp.broadcast_to(last_tokens, tables[1].shape)
    tables[2] = tables[2].at[:, 0].set(1.0)
    return tuple(tables)


Guesser = Callable[[Grown], tuple[jax.Array, Grown]]
"""What may come after the frontier's nodes: logits [B, W, >= V], or [B, 1, >= V] where
they are the same for all; and what has grown, with records of what was read."""


def by_model(model: Model, state: State, hands_down: bool = False) -> Guesser:
    """Returns a guesser that reads the frontier with a model.

    Args:
      state: the model's, after the root.
      hands_down: whether each node also reads its parent's hidden state, as MTP layers
        do. `Grown.records` is then a pair: the records, and hidden states
        [B, 1 + C, d] float32 of the root and the candidates.
    """

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        above, C = grown.frontier, grown.pool.tokens.shape[1]
        # The best come first. Of a batch, as many are read as of the row with the most.
        count = (above.value > 0).sum(axis=1, dtype=jnp.int32).max()
        place = jnp.arange(above.rows.shape[0], dtype=jnp.int32)
        live = jnp.full(above.value.shape[:1], count)
        records, handed, previous = grown.records, None, None
        if hands_down:
            records, handed = grown.records
            previous = of_rows(handed, grown.pool.parents[:, above.rows])
        hidden, records, _ = forward_hidden(
            model,
            state,
            grown.pool.tokens[:, above.rows],
            grown.nodes,
            records=records,
            rows=jnp.where(place < count, above.rows, C),
            previous=previous,
            live=live,
        )
        if handed is not None:
            records = records, handed.at[:, 1 + above.rows].set(hidden)
        grown = replace(grown, records=records, passes=grown.passes + 1)
        return logits_of(model, hidden, live), grown

    return guess


def of_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows [B, W] of a table [B, C, ...]."""
    return jax.vmap(lambda one, at: one[at])(table, rows)


def by_depth(logits: jax.Array, alike: bool) -> Guesser:
    """Returns a guesser whose guesses go by depth alone.

    Args:
      logits: [B, M, >= V] float32, of the tokens at depths 1 .. M.
      alike: whether what is drawn depends on nothing else, either.
    """

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        own = lax.dynamic_index_in_dim(logits, grown.levels, axis=1)
        shape = own.shape[0], 1 if alike else grown.frontier.value.shape[1]
        grown = replace(grown, passes=grown.passes + 1)
        return jnp.broadcast_to(own, (*shape, own.shape[2])), grown

    return guess


def nothing_grown(
    model: Model | None, batch: int, width: int, depth: int, ahead: int = 0
) -> Grown:
    """Returns the root, and space for `depth` levels of `width` candidates.

    Args:
      model: that reads them; None: nobody does.
      ahead: G, guesses that are read with a level.
    """
    W, C, taps = width, width * depth, 1 if model is None else model.config.conv_taps
    records: Records = ()
    if model is not None:
        room = batch, C + ahead, param_dtype(model.params)
        records = init_records(model.config, *room)
    tables = _no_levels(_levels(depth, taps, ahead), batch, width)
    mask, window, value, path, tokens, parents, values, kinds, paths = tables[:9]
    node_mask, node_depth, node_window = tables[9:]
    guessed = jnp.zeros((batch, C), bool)
    return Grown(
        pool=Pool(tokens, parents, values, kinds, paths, guessed),
        nodes=Nodes(node_mask, node_depth, node_window),
        records=records,
        frontier=Frontier(jnp.full((W,), -1, jnp.int32), mask, window, value, path),
        levels=jnp.int32(0),
        passes=jnp.int32(0),
    )
