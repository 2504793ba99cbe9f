"""Staged drafting for tree "auto": n-grams guess the levels of a draft model.

A pass of the draft model reads its frontier, and below it the next levels as guessed by
n-grams. Nodes of a later level that were guessed need no further pass. The model reads
the same nodes as without guesses, so the values of all candidates are the same. One
thing differs: if some nodes of a level were guessed, the others get no children unless
a pass for them is worth its time.

Letters: B rows, W nodes of a level, A levels that are guessed, Wg guesses per level,
G = A Wg guesses per pass, C candidates, n order of the n-grams, N candidates of a
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
    """N-grams that guess for a draft model, and the size of their guesses.

    Attributes:
      ngrams: the n-gram table.
      ahead: A, the number of levels that are guessed.
      width: Wg, the number of guesses per level.
    """

    ngrams: NGrams
    ahead: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)

    @property
    def guesses(self) -> int:
        """G, the number of guesses per pass."""
        return self.ahead * self.width


@struct.dataclass
class GuessedLevels(ModelLevels):
    """A searcher with a draft model whose levels are guessed by n-grams.

    Attributes:
      stage: the n-grams.
    """

    stage: Stage

    def without_guesses(self) -> Searcher:
        return ModelLevels(self.model)

    def expected_levels(self, levels: int) -> float:
        """Returns the expected number of levels per pass, for drafts of `levels`
        levels."""
        args = self.stage.ngrams.rates, self.stage.ahead, self.stage.width
        return levels / staged_passes(levels, *args)

    def _levels(self, state: State, query: Query) -> tuple[Any, Any, Any]:
        text = query.text.tokens, query.text.length
        args = self.stage, text, query.dist, query.rule, query.worth
        guesser = by_stage(self.model, state, *args)
        batch = query.text.length.shape[0]
        size = batch, query.width, query.depth, self.stage.guesses
        start = nothing_grown(self.model, *size)
        start = replace(start, ahead=no_guesses(self.model, batch, self.stage))
        return guesser, start, partial(goes_on, query.worth)

    def search_reads(
        self, state: State, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        own = super().search_reads(state, passes, guessing, size)
        contexts = size[0] + (self.stage.ahead - 1) * self.stage.width
        table = self.stage.ngrams.lookup_bytes
        return [*own, Reads("n-gram", guessing, table, contexts)]

    def key(self) -> str:
        # Step times depend on the sizes of the table, not on its contents.
        stage = f"{self.stage.ngrams}, {self.stage.ahead} x {self.stage.width} guesses"
        return f"{super().key()} {stage}"


@struct.dataclass
class Below:
    """The nodes of one level below which n-grams guess the next level. They are the
    frontier at first, and then the guesses for the level before.

    Attributes:
      rows: [Wg] int32. Indices of the nodes among candidates and guesses.
      tokens: [B, Wg] int32. Tokens of the nodes.
      path, value, mask, window: the same as in `Frontier`, for these nodes.
      context: [B, Wg, n - 1] int32. The last tokens up to and including each node.
    """

    rows: jax.Array
    tokens: jax.Array
    path: jax.Array
    value: jax.Array
    mask: jax.Array
    window: jax.Array
    context: jax.Array


def no_guesses(model: Model, batch: int, stage: Stage) -> Ahead:
    """Returns an `Ahead` in which all guesses are padding."""
    shape = batch, stage.guesses
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
    """Returns a guesser that runs a model on the nodes of the frontier that were not
    guessed.

    Args:
      model: the draft model.
      state: the model's state after the root.
      stage: the n-grams.
      text: [B, S] int32 and lengths [B]. The last valid token is the root.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
      worth: decides whether a pass is worth its time.
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
        assert grown.ahead is not None  # set by `no_guesses`
        logits = jnp.take_along_axis(grown.ahead.logits, at[..., None], axis=1)
        pool = _marked(grown.pool, front.rows, known)
        records = _with_read(grown, known, at)
        grown = replace(grown, pool=pool, records=records)
        # A loop that runs at most once, because a conditional would copy the records.
        start = needed, logits, grown
        _, logits, grown = lax.while_loop(lambda carry: carry[0], run, start)
        value = jnp.where(needed | known, front.value, 0.0)
        return logits, replace(grown, frontier=replace(front, value=value))

    return guess


def goes_on(worth: Worth, grown: Grown) -> jax.Array:
    """Returns [] bool, whether to compute another level of candidates.

    The children of nodes that n-grams guessed are already known, so they cost no pass
    of the draft model. The children of the other nodes cost one pass. True if either
    group of children is worth its time.
    """
    value = grown.frontier.value
    known, _ = found(grown)
    free = worth(grown.levels, jnp.where(known, value, 0.0), 0.0)
    return free | worth(grown.levels, jnp.where(known, 0.0, value))


def found(grown: Grown) -> tuple[jax.Array, jax.Array]:
    """Finds the nodes of the frontier that the draft model has already read as guesses.

    Returns:
      [B, W] bool, True for these nodes, and [B, W] int32, their indices among the
      guesses (unspecified for other nodes).
    """
    front, ahead = grown.frontier, grown.ahead
    assert ahead is not None  # set by `no_guesses`
    tokens = grown.pool.tokens[:, jnp.maximum(front.rows, 0)]
    same = (front.path[..., None] == ahead.path[:, None]) & ahead.exists[:, None]
    same &= tokens[..., None] == ahead.tokens[:, None]  # hashes of paths may collide
    known = same.any(axis=2) & (front.value > 0)
    return known & (grown.levels > 0), jnp.argmax(same, axis=2).astype(jnp.int32)


def _marked(pool: Pool, rows: jax.Array, known: jax.Array) -> Pool:
    """Returns the pool with `guessed` set for the nodes of the frontier that were
    guessed."""
    rows = jnp.maximum(rows, 0)
    marked = pool.guessed.at[:, rows].set(pool.guessed[:, rows] | known)
    return replace(pool, guessed=marked)


def _with_read(grown: Grown, known: jax.Array, at: jax.Array) -> tuple:
    """Returns the draft model's records, with those of right guesses copied to the
    places of the frontier's nodes.

    Args:
      grown: the levels so far.
      known: [B, W] bool. True for nodes of the frontier that were guessed.
      at: [B, W] int32. Indices of these nodes among the guesses.
    """
    rows, C = jnp.maximum(grown.frontier.rows, 0), grown.pool.tokens.shape[1]

    def moved(table: jax.Array) -> jax.Array:
        trailing = [1] * (table.ndim - 2)
        index = (C + at).reshape(*at.shape, *trailing)
        read = jnp.take_along_axis(table, index, axis=1)
        right = known.reshape(*known.shape, *trailing)
        return table.at[:, rows].set(jnp.where(right, read, table[:, rows]))

    return jax.tree.map(moved, grown.records)


def _guesses(
    grown: Grown, stage: Stage, tail: jax.Array, dist: Distribution, rule: Rule
) -> list[Below]:
    """Returns A guessed levels below the frontier: the paths with the largest values
    by the n-grams.

    Args:
      grown: the levels so far.
      stage: the n-grams.
      tail: [B, n - 1] int32. The last tokens of the text.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
    """
    front, pool = grown.frontier, grown.pool
    C = pool.tokens.shape[1]
    above = Below(
        rows=front.rows,
        tokens=pool.tokens[:, front.rows],
        path=front.path,
        value=front.value,
        mask=jnp.pad(front.mask, ((0, 0), (0, 0), (0, stage.guesses))),
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
    """Returns the likeliest children of a level.

    Args:
      above: the level.
      rows: [Wg] int32. Indices of the children among candidates and guesses.
      depth: [] int32. Depth of the level.
      ngrams: the n-gram table.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
    """
    batch, width = above.tokens.shape[0], rows.shape[0]
    noise = None
    if dist.sampling is not None and rule.drafting == "coupled":
        noise = dist.noise(depth)[:, None]
    tokens, chance = perturbed(ngrams, above.context, ngrams.scale(dist), noise)
    chance = jax.nn.softmax(chance, axis=-1)  # normalised over the found tokens only
    value = (above.value[..., None] * chance).reshape(batch, -1)
    most = min(width, value.shape[1])  # a shorter list is padded with nodes of value 0
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
    """Returns the nodes of the candidates, followed by those of the guesses."""
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
    """Returns the last n - 1 tokens [B, W, n - 1] up to and including nodes of the last
    level.

    Args:
      pool: the candidates.
      rows: [W] int32. Indices of the nodes.
      levels: [] int32. Depth of the nodes below the root.
      tail: [B, n - 1] int32. The last tokens of the text, including the root.
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
