"""Levels of tree "auto" through a stage: n-grams guess what a model is going to read.

A pass of the model reads its frontier, and below it what n-grams think the next levels
will be. Nodes of a later level that are among these need no pass any more. What is read
is what the model alone would have read, and so are the values of all candidates; only
that a node is left without children where it was not guessed, others of its level were,
and a pass for it would not be worth its time.

Letters: B rows, W nodes of a level, A levels that are guessed, Wg guesses of a level,
G = A Wg guesses of a pass, C candidates, n the n-grams' order, N candidates of a
lookup, V tokens of the vocabulary, d width of hidden states, K taps of a convolution.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Model, Nodes, State, forward_hidden, logits_of
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import (
    Ahead,
    Grown,
    Guesser,
    Worth,
    nothing_grown,
)
from stree_jax.speculation.adaptive.model_levels import ModelLevels
from stree_jax.speculation.adaptive.pool import Pool, path_powers
from stree_jax.speculation.adaptive.search import Query, Searcher
from stree_jax.speculation.drafter import Reads
from stree_jax.speculation.drafters.ngrams import NGrams, perturbed
from stree_jax.speculation.gain import staged_passes


@struct.dataclass
class Stage:
    """N-grams, and how far they guess.

    Attributes:
      ngrams: see there.
      ahead: A.
      width: Wg.
    """

    ngrams: NGrams
    ahead: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)

    @property
    def room(self) -> int:
        """G."""
        return self.ahead * self.width


@struct.dataclass
class GuessedLevels(ModelLevels):
    """A draft model whose levels are guessed.

    Attributes:
      stage: guesses them.
    """

    stage: Stage

    def without_guesses(self) -> Searcher:
        return ModelLevels(self.model)

    def expected_levels(self, levels: int) -> float:
        """Returns how many of so many levels a pass is expected to reach."""
        asked = self.stage.ngrams.rates, self.stage.ahead, self.stage.width
        return levels / staged_passes(levels, *asked)

    def _levels(self, state: State, query: Query) -> tuple[Any, Any, Any]:
        text = query.text.tokens, query.text.length
        asked = self.stage, text, query.dist, query.rule, query.worth
        guesser = by_stage(self.model, state, *asked)
        batch = query.text.length.shape[0]
        size = batch, query.width, query.depth, self.stage.room
        start = nothing_grown(self.model, *size)
        start = replace(start, ahead=room_ahead(self.model, batch, self.stage))
        return guesser, start, partial(goes_on, query.worth)

    def search_reads(
        self, state: State, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        own = super().search_reads(state, passes, guessing, size)
        contexts = size[0] + (self.stage.ahead - 1) * self.stage.width
        table = self.stage.ngrams.lookup_bytes
        return [*own, Reads("n-gram", guessing, table, contexts)]

    def key(self) -> str:
        # What the n-grams say does not change a pass.
        stage = f"{self.stage.ngrams}, {self.stage.ahead} x {self.stage.width} guesses"
        return f"{super().key()} {stage}"


@struct.dataclass
class Below:
    """Guessed nodes of a level, or the frontier that they are guessed below.

    Attributes:
      rows: [Wg] int32, among candidates and guesses.
      tokens, path, value, mask, window: of each, as of `Frontier`.
      context: [B, Wg, n - 1] int32, the last tokens up to each.
    """

    rows: jax.Array
    tokens: jax.Array
    path: jax.Array
    value: jax.Array
    mask: jax.Array
    window: jax.Array
    context: jax.Array


def room_ahead(model: Model, batch: int, stage: Stage) -> Ahead:
    """Returns space for guesses, none of which was read."""
    shape = batch, stage.room
    zeros = jnp.zeros(shape, jnp.int32)
    _, V = jax.eval_shape(_logits_of_one, model).shape
    logits = jnp.zeros((*shape, V), jnp.float32)
    return Ahead(zeros, zeros.astype(jnp.uint32), zeros > 0, logits)


def _logits_of_one(model: Model) -> jax.Array:
    return logits_of(model, jnp.zeros((1, 1, model.config.d_model)))[0]


def by_stage(
    model: Model,
    state: State,
    stage: Stage,
    text: tuple[jax.Array, jax.Array],
    dist: Distribution,
    rule: Rule,
    worth: Worth,
) -> Guesser:
    """Returns a guesser that reads the frontier with a model where it was not guessed.

    Args:
      state: of the model, after the root.
      text: [B, S] int32 and lengths [B], the root the last token that counts.
      worth: whether a pass is worth it.
    """
    tail = stage.ngrams.tail(*text).tokens

    def run(carry: tuple) -> tuple:
        _, _, grown = carry
        W = grown.frontier.rows.shape[0]
        guessed = _guesses(grown, stage, tail, dist, rule)
        front = grown.frontier.rows
        tokens = [grown.pool.tokens[:, front], *(level.tokens for level in guessed)]
        rows = [front, *(level.rows for level in guessed)]
        hidden, records, _ = forward_hidden(
            model,
            state,
            jnp.concatenate(tokens, axis=1),
            _with_guesses(grown, guessed),
            records=grown.records,
            rows=jnp.concatenate(rows),
        )
        logits = logits_of(model, hidden)
        ahead = Ahead(
            tokens=jnp.concatenate(tokens[1:], axis=1),
            path=jnp.concatenate([level.path for level in guessed], axis=1),
            exists=jnp.concatenate([level.value > 0 for level in guessed], axis=1),
            logits=logits[:, W:],
        )
        more = dict(records=records, ahead=ahead, passes=grown.passes + 1)
        return jnp.bool_(False), logits[:, :W], replace(grown, **more)

    def guess(grown: Grown) -> tuple[jax.Array, Grown]:
        front = grown.frontier
        known, at = found(grown)
        needed = worth(grown.levels, jnp.where(known, 0.0, front.value))
        assert grown.ahead is not None  # of `room_ahead`
        logits = jnp.take_along_axis(grown.ahead.logits, at[..., None], axis=1)
        pool = _marked(grown.pool, front.rows, known)
        records = _with_read(grown, known, at)
        grown = replace(grown, pool=pool, records=records)
        # A loop that runs once, if at all: a conditional would copy the records.
        start = needed, logits, grown
        _, logits, grown = lax.while_loop(lambda carry: carry[0], run, start)
        value = jnp.where(needed | known, front.value, 0.0)
        return logits, replace(grown, frontier=replace(front, value=value))

    return guess


def goes_on(worth: Worth, grown: Grown) -> jax.Array:
    """True if another level is worth it, without a pass or with one."""
    value = grown.frontier.value
    known, _ = found(grown)
    free = worth(grown.levels, jnp.where(known, value, 0.0), 0.0)
    return free | worth(grown.levels, jnp.where(known, 0.0, value))


def found(grown: Grown) -> tuple[jax.Array, jax.Array]:
    """Returns which nodes of the frontier [B, W] were read as guesses, and as which of
    them."""
    front, ahead = grown.frontier, grown.ahead
    assert ahead is not None  # of `room_ahead`
    tokens = grown.pool.tokens[:, jnp.maximum(front.rows, 0)]
    same = (front.path[..., None] == ahead.path[:, None]) & ahead.exists[:, None]
    same &= tokens[..., None] == ahead.tokens[:, None]  # paths may share a number
    known = same.any(axis=2) & (front.value > 0)
    return known & (grown.levels > 0), jnp.argmax(same, axis=2).astype(jnp.int32)


def _marked(pool: Pool, rows: jax.Array, known: jax.Array) -> Pool:
    """Marks the nodes that were guessed, so that the model need not read them."""
    rows = jnp.maximum(rows, 0)
    marked = pool.guessed.at[:, rows].set(pool.guessed[:, rows] | known)
    return replace(pool, guessed=marked)


def _with_read(grown: Grown, known: jax.Array, at: jax.Array) -> tuple:
    """Copies the records of guesses that are in the frontier to its nodes."""
    rows, C = jnp.maximum(grown.frontier.rows, 0), grown.pool.tokens.shape[1]

    def moved(table: jax.Array) -> jax.Array:
        beside = [1] * (table.ndim - 2)
        read = jnp.take_along_axis(table, (C + at).reshape(*at.shape, *beside), axis=1)
        stay = table[:, rows]
        right = known.reshape(*known.shape, *beside)
        return table.at[:, rows].set(jnp.where(right, read, stay))

    return jax.tree.map(moved, grown.records)


def _guesses(
    grown: Grown, stage: Stage, tail: jax.Array, dist: Distribution, rule: Rule
) -> list[Below]:
    """Returns A levels below the frontier, by the n-grams' values of whole paths.

    Args:
      tail: [B, n - 1] int32, the end of the text.
    """
    front, pool = grown.frontier, grown.pool
    C = pool.tokens.shape[1]
    above = Below(
        rows=front.rows,
        tokens=pool.tokens[:, front.rows],
        path=front.path,
        value=front.value,
        mask=jnp.pad(front.mask, ((0, 0), (0, 0), (0, stage.room))),
        window=front.window,
        context=_contexts(pool, front.rows, grown.levels, tail),
    )
    levels = []
    for j in range(stage.ahead):
        rows = C + j * stage.width + jnp.arange(stage.width, dtype=jnp.int32)
        above = _guessed_level(above, rows, grown.levels + j, stage.ngrams, dist, rule)
        levels.append(above)
    return levels


def _guessed_level(
    above: Below,
    rows: jax.Array,
    depth: jax.Array,
    ngrams: NGrams,
    dist: Distribution,
    rule: Rule,
) -> Below:
    """Returns the likeliest children of a level, to be nodes `rows` [Wg].

    Args:
      depth: [] int32, the level's.
    """
    batch, width = above.tokens.shape[0], rows.shape[0]
    noise = None
    if dist.sampling is not None and rule.drafting == "coupled":
        noise = dist.noise(depth)[:, None]
    tokens, chance = perturbed(ngrams, above.context, ngrams.scale(dist), noise)
    chance = jax.nn.softmax(chance, axis=-1)  # of these few
    value = (above.value[..., None] * chance).reshape(batch, -1)
    most = min(width, value.shape[1])  # a short list is filled up with impossible ones
    short = ((0, 0), (0, width - most))
    value, chosen = (jnp.pad(best, short) for best in lax.top_k(value, most))
    parent = (chosen // tokens.shape[2]).astype(jnp.int32)
    token = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    token = jnp.maximum(token, 0)

    def of_parent(table: jax.Array) -> jax.Array:
        index = parent.reshape(*parent.shape, *[1] * (table.ndim - 2))
        return jnp.take_along_axis(table, index, axis=1)

    nodes, taps = above.mask.shape[2], above.window.shape[2]
    itself = rows[:, None] == jnp.arange(nodes, dtype=jnp.int32)[None]
    own = jnp.broadcast_to(rows[None, :, None] + taps - 1, (batch, width, 1))
    power = path_powers(nodes)[depth]
    return Below(
        rows=rows,
        tokens=token,
        path=of_parent(above.path) + (token + 1).astype(jnp.uint32) * power,
        value=value,
        mask=of_parent(above.mask) | itself[None],
        window=jnp.concatenate([of_parent(above.window)[..., 1:], own], axis=2),
        context=jnp.concatenate(
            [of_parent(above.context)[..., 1:], token[..., None]], axis=2
        ),
    )


def _with_guesses(grown: Grown, guessed: list[Below]) -> Nodes:
    """Returns the candidates' nodes, and behind them the guesses."""
    C, nodes = grown.pool.tokens.shape[1], grown.nodes
    depth = [nodes.depth[:, :C]]
    for j, level in enumerate(guessed):
        depth.append(jnp.broadcast_to(grown.levels + j, level.tokens.shape))
    return Nodes(
        mask=jnp.concatenate([nodes.mask[:, :C], *(g.mask for g in guessed)], axis=1),
        depth=jnp.concatenate(depth, axis=1),
        window=jnp.concatenate(
            [nodes.window[:, :C], *(g.window for g in guessed)], axis=1
        ),
    )


def _contexts(
    pool: Pool, rows: jax.Array, levels: jax.Array, tail: jax.Array
) -> jax.Array:
    """Returns the last n - 1 tokens [B, W, n - 1] up to nodes `rows` [W] of the last
    level.

    Args:
      levels: [] int32, the candidates' depth below the root.
      tail: [B, n - 1] int32, the last tokens of the text, the root included.
    """
    batch, count = tail.shape
    row = jnp.broadcast_to(rows[None], (batch, rows.shape[0]))
    tokens = []
    for back in range(count):
        of_tree = jnp.take_along_axis(pool.tokens, jnp.maximum(row, 0), axis=1)
        place = jnp.clip(count - 1 - (back - levels), 0, count - 1)
        of_text = jnp.take(tail, place, axis=1)[:, None]
        tokens.append(jnp.where(back < levels, of_tree, of_text))
        row = jnp.take_along_axis(pool.parents, jnp.maximum(row, 0), axis=1) - 1
    return jnp.stack(tokens[::-1], axis=2)
