"""Drafts with block drafters: DFlash, DFlash2 and DSpark, see `models.drafters.dflash`.

One pass of the block drafter gives K candidate tokens for every level of the tree. Pair
scores then say how likely each candidate is after each candidate of the level above. So
a tree of any shape takes one pass.

Letters: B rows, T nodes, M depth of the tree, K candidates per level, Q nodes of a
level, W nodes of a level with tree "auto", V tokens, d width of the drafter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    ModelConfig,
    Taps,
    grow,
    param_dtype,
    without_mtp,
)
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.drafters.dflash import (
    DFlash,
    DFlashConfig,
    add_context,
    dflash_table,
    draft_logits,
    empty_context,
    run_block,
    with_other_pairing,
)
from stree_jax.models.drafters.dflash_pairs import confidence, no_memory
from stree_jax.models.drafters.heads import head_of
from stree_jax.models.layers.params import abstract_table
from stree_jax.models.stack.boundaries import moved_boundaries, tap_of
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.sampling.best import best_scores
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import (
    Grown,
    Scored,
    nothing_grown,
    of_rows,
)
from stree_jax.speculation.adaptive.search import Query, Search, Searcher, any_level
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import (
    DraftState,
    Prompts,
    Reads,
    Update,
)
from stree_jax.speculation.drafters.block_candidates import (
    Candidates,
    at_depth,
    pair_temperature,
)
from stree_jax.speculation.drafters.model import draw_level, empty_draft
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams, ngram_pairs
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.progress import Reading, add_unread
from stree_jax.speculation.drafters.shortlist import chained, log_rest, reached
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.layout import tree_levels
from stree_jax.speculation.source import Source, Vocabulary, Work, check_sizes
from stree_jax.speculation.tree import Auto, Topology, Tree

CANDIDATES = 16  # K; DFlash2's selector was trained with 16
# Assumed, not measured: if the best candidate is wrong, how often another one is right.
RESCUED = 0.6


@struct.dataclass
class DFlashSource(Source):
    """The source of draft tokens for a block drafter, with or without n-grams that
    score pairs of tokens."""

    value: DFlash | WithNGrams
    name = "block drafter"
    prefers_auto = True
    by_level = False
    one_pass = True
    top1 = 0.7

    @classmethod
    def abstract(cls, config: DFlashConfig, dtype: Any) -> Source:
        """Returns a source of `jax.ShapeDtypeStruct`."""
        params = abstract_table(dflash_table(config), dtype)
        ids: Any = None
        if 0 < config.head_rows < config.vocab_size:
            ids = jax.ShapeDtypeStruct((config.head_rows,), jnp.int32)
        return cls(DFlash(params, config, ids))

    @property
    def drafter(self) -> DFlash:
        """The block drafter."""
        return self.value.drafter if isinstance(self.value, WithNGrams) else self.value

    @property
    def ngrams(self) -> NGrams | None:
        """The n-grams that score pairs of tokens, if there are any."""
        return self.value.ngrams if isinstance(self.value, WithNGrams) else None

    @property
    def drafts(self) -> int:
        """Number of tokens that one pass drafts."""
        return self.drafter.config.drafts

    def narrower(self) -> Iterator[Source]:
        yield self

    def check(self, target: Model) -> None:
        if isinstance(self.value, WithNGrams):
            self.value.check()
        own, c = self.drafter.config, target.config
        if own.target_width != c.d_model:
            raise ValueError(
                f"drafter: reads states {own.target_width} wide, but the target's are "
                f"{c.d_model} wide; use {own.target or 'the model of its training'}"
            )
        borrows = not own.own_embedding or not own.head_rows
        if borrows and own.d_model != c.d_model:
            raise ValueError(
                f"drafter: is {own.d_model} wide and has no embedding or head, but the "
                f"target's are {c.d_model} wide"
            )
        if own.vocab_size < c.num_tokens:
            raise ValueError(
                f"drafter: has {own.vocab_size} tokens, but the target has "
                f"{c.num_tokens}; use {own.target or 'the model of its training'}"
            )
        for boundary in own.boundaries:
            tap_of(c, boundary)

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        if self.ngrams is not None:
            yield Vocabulary("n-grams", self.ngrams.num_tokens, None)

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Auto):
            return
        if not isinstance(tree, Tree):
            raise ValueError(
                "tree: a block drafter fills a fixed tree, such as "
                f"'chain:{self.drafts}', or 'auto'; beams need a draft model"
            )
        if tree.depth > self.drafts:
            raise ValueError(
                f"tree: {tree.depth} levels, but the drafter's block has {self.drafts}"
            )
        if tree.children > CANDIDATES:
            raise ValueError(
                f"tree: {tree.children} children per node; a block drafter has "
                f"{CANDIDATES} candidates"
            )

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        if not isinstance(past, ContextState):
            return
        dtype = param_dtype(target.params)
        own = jax.eval_shape(lambda: empty_context(self.drafter, batch, 1, dtype))
        name = "past: of another block drafter"
        check_sizes(name, target, own, past.state)
        if past.unread.shape[2] != streams_width(self.drafter):
            raise ValueError(name)

    def bind(self, target: Model, tree: Topology) -> "DFlashDrafter":
        drafter, output = self.drafter, head_of(without_mtp(target))
        taps = tuple(tap_of(target.config, b) for b in drafter.config.boundaries)
        late = isinstance(tree, Auto)  # which has steps of plain decoding
        return DFlashDrafter(drafter, output, taps, self.ngrams, late)

    @property
    def search_size(self) -> tuple[int, int]:
        # Levels take no further passes, so they can be wide.
        return 8, self.drafts

    def acceptance(self) -> Acceptance:
        return Acceptance(super().acceptance().p[: self.drafts])

    @property
    def kind(self) -> str:
        return self.drafter.config.kind

    def readings(self, target: Model) -> dict[str, Any]:
        return readings(self.drafter, target.config)

    def work(self, target: Model) -> Work:
        return Work(read_once=block_read(self.drafter, head_of(without_mtp(target))))


def block_read(drafter: DFlash, output: Model) -> int:
    """Returns the bytes of weights that one pass of a block drafter reads: all matrices
    except the embedding and the tables of pair scores: it reads few of their rows.

    Args:
      drafter: the block drafter.
      output: the target's embedding and head, which is read if the drafter has none.
    """
    rows = "embedding", "pairs"
    read = size_of({k: x for k, x in drafter.params.items() if k not in rows})
    return read if drafter.config.head_rows else read + weights_read(output)


def streams_width(drafter: DFlash) -> int:
    """Returns the total width of the residual streams that a block drafter reads."""
    return len(drafter.config.boundaries) * drafter.config.target_width


@register_for_export
@struct.dataclass
class ContextState(Reading):
    """The state of a `DFlashDrafter`.

    Attributes:
      state: keys and values of the context rows, one per token that the target has read
        except the unread ones; see `models.drafters.dflash`.
      unread: [B, U, m dt] float32. The residual streams of the unread tokens: m taps of
        the target's width dt, concatenated. U is 0 unless the drafter `reads_late`.
    """


@struct.dataclass
class DFlashDrafter(Searcher):
    """A drafter that fills trees with the candidates of a block drafter such as DFlash.

    Attributes:
      drafter: the block drafter's network.
      output: the target's embedding and head, which the network uses if it has none;
        see `models.drafters.heads.head_of`.
      taps: the target's layers whose residual streams the network reads.
      ngrams: n-grams that score pairs of tokens. If None, the network's own pair scores
        are used, or no pair scores if it has none.
      reads_late: True if the context rows of new tokens are computed together when it
        next drafts. If False, they are computed at the end of every step.
    """

    drafter: DFlash
    output: Model
    taps: Taps = struct.field(pytree_node=False)
    ngrams: NGrams | None
    reads_late: bool = struct.field(pytree_node=False)
    cuts_back = True
    copies_caches = False  # a step never writes them between two reads

    def init(self, prompts: Prompts, past: DraftState | None) -> ContextState:
        zeros, capacity = jnp.zeros_like(prompts.lengths), prompts.capacity
        batch, size = zeros.shape[0], prompts.update_width if self.reads_late else 0
        if isinstance(past, ContextState):
            past = replace(past, state=grow(past.state, capacity))
            waits = past.unread.shape[1] > 0
            context = self.read(past).state if waits else past.state
        else:
            dtype = param_dtype(self.output.params)
            context = empty_context(self.drafter, batch, capacity, dtype)
        unread = jnp.zeros((batch, size, streams_width(self.drafter)), jnp.float32)
        return ContextState(context, unread, zeros, zeros, size)

    def observe(self, state: ContextState, update: Update) -> ContextState:
        rows = add_context(self.drafter, state.state, update.taps, update.read)
        return replace(state, state=rows)

    def commit(self, state: ContextState, update: Update) -> ContextState:
        if not self.reads_late:
            return self.observe(state, update)
        streams = jnp.concatenate(update.taps, axis=-1)
        return add_unread(state, streams, update.read, self.read)

    def read(self, state: ContextState) -> ContextState:
        """Computes the context rows of the unread tokens."""
        streams, count = (state.unread,), state.unread_length
        rows = add_context(self.drafter, state.state, streams, count)
        return replace(state, state=rows, unread_length=jnp.zeros_like(count))

    def read_for_cache(self, state: ContextState) -> ContextState:
        return self.read(state) if self.reads_late else state

    def propose(
        self,
        state: ContextState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, ContextState]:
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Tree)  # checked by `DFlashSource.check_tree`
        found = self.candidates(state, root, tree.depth, dist, rule)
        draft = fill_from(self.drafter, found, root, tree, dist, rule)
        return draft, replace(state, passes=state.passes + 1)

    def candidates(
        self,
        state: ContextState,
        root: jax.Array,
        depth: int,
        dist: Distribution,
        rule: Rule,
    ) -> Candidates:
        """Runs the block drafter once, below the roots, and returns its candidates.

        Args:
          state: the state after the text, without unread tokens.
          root: [B] int32. Tokens of the roots.
          depth: number of levels for which candidates are returned.
          dist: the distribution of the tokens below the root.
          rule: the acceptance rule.
        """
        drafter, slots = self.drafter, self.drafter.config.slots_for(depth)
        hidden = run_block(drafter, self.output, state.state, root, slots)[:, :depth]
        logits = draft_logits(drafter, self.output, hidden)[..., : dist.num_tokens]
        depths = jnp.arange(depth, dtype=jnp.int32)
        plain = scores = dist.scores(logits, depths[None], normalised=False)
        if dist.sampling is not None and rule.drafting == "coupled":
            scores = scores + jnp.stack(list(map(dist.noise, depths)), axis=1)
        count = min(CANDIDATES, dist.num_tokens)
        heat = pair_temperature(dist, root.shape[0])
        if chained(drafter):
            tokens = reached(drafter, hidden, scores, root, heat, count)
            best = jnp.take_along_axis(scores, tokens, axis=-1)
            total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        else:
            best, tokens, total = best_scores(scores, count=count)
        rest = log_rest(best, total)
        logits = jnp.take_along_axis(logits, tokens, axis=-1)
        pairs = None
        if self.ngrams is not None:  # the target's noise is no part of q
            plain = jnp.take_along_axis(plain, tokens, axis=-1)
            scale = self.ngrams.scale(dist)
            pairs = ngram_pairs(self.ngrams, root, tokens, plain, scale)
            pairs = pairs * heat[:, None, None, None]
        return Candidates(hidden, tokens, logits, best, rest, pairs)

    def search(self, state: ContextState, query: Query) -> tuple[ContextState, Search]:
        batch, W = query.text.length.shape[0], query.width
        text = query.text
        root = jnp.take_along_axis(text.tokens, text.length[:, None] - 1, axis=1)[:, 0]
        args = root, query.depth, query.dist, query.rule
        state = self.read(state) if self.reads_late else state
        found = self.candidates(state, *args)
        guess = ByPairs(self.drafter, found, query)
        start = nothing_grown(None, batch, W, query.depth)
        memory = no_memory(self.drafter, (batch, 1 + W * query.depth))
        at_root, first = guess.scored(root[:, None], memory[:, :1], jnp.int32(0))
        start = replace(start, records=memory.at[:, :1].set(first))
        step = any_level(query), jnp.int32(1), False
        return state, Search(at_root, guess, start, *step)

    @property
    def models(self) -> tuple[Model, ...]:
        return ()  # `output` is a model, but does not run forward passes

    @property
    def of_target(self) -> Any:
        return self.output

    def logit_rows(self, tree: Topology) -> int:
        return 2 * min(tree.depth, self.drafter.config.drafts)

    def reads(self, state: ContextState, menu: Sequence[Topology]) -> list[Reads]:
        each = block_read(self.drafter, self.output)
        return [Reads("block drafter", state.passes, each, state=state.state)]

    def search_reads(
        self, state: ContextState, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        each = block_read(self.drafter, self.output)
        return [Reads("block drafter", passes, each, state=state.state)]

    def key(self) -> str:
        stage = "" if self.ngrams is None else f" {self.ngrams}"
        return f"{self.drafter.config} {self.drafter.weight_format}{stage}"


def fill_from(
    drafter: DFlash,
    found: Candidates,
    root: jax.Array,
    tree: Tree,
    dist: Distribution,
    rule: Rule,
) -> Draft:
    """Fills a static tree with candidates.

    All other tokens have probability 0 in q: draws and their probabilities are those of
    the distribution over a level's candidates.

    Args:
      drafter: the block drafter.
      found: the candidates, for at least the depth of the tree.
      root: [B] int32. Tokens of the roots.
      tree: the tree.
      dist: the distribution of the tokens below the root.
      rule: the acceptance rule.
    """
    levels, parents = tree_levels(tree), jnp.asarray(tree.parents, jnp.int32)
    batch = jnp.arange(root.shape[0], dtype=jnp.int32)[:, None, None]

    def level(
        carry: tuple[Draft, jax.Array], depth: jax.Array
    ) -> tuple[tuple[Draft, jax.Array], None]:
        draft, memory = carry
        above = levels.inner[depth]
        at = jnp.minimum(above, tree.size - 1)
        tokens, logits = at_depth((found.tokens, found.logits), depth)
        before = memory[:, jnp.maximum(parents[at], 0)]
        before = jnp.where(depth > 0, before, 0.0)
        pairs, own = found.pairs_after(drafter, draft.tokens[:, at], before, depth)
        memory = memory.at[:, above].set(own, mode="drop")
        full = jnp.full((*pairs.shape[:2], dist.num_tokens), -jnp.inf)
        node = jnp.arange(pairs.shape[1], dtype=jnp.int32)[None, :, None]
        full = full.at[batch, node, tokens[:, None]].set(logits[:, None] + pairs)
        return (draw_level(draft, full, depth, tree, levels, dist, rule), memory), None

    memory = no_memory(drafter, (root.shape[0], tree.size))
    carry = empty_draft(root, tree, dist, rule), memory
    return lax.scan(level, carry, jnp.arange(tree.depth, dtype=jnp.int32))[0][0]


class ByPairs:
    """A guesser for `best_first` that scores the block drafter's candidates of the next
    level after each node of the frontier.

    `Grown.records` contains the memory of pair scores [B, 1 + C, r] of the root and of
    the nodes, see `models.drafters.dflash_pairs.no_memory`.
    """

    def __init__(self, drafter: DFlash, found: Candidates, query: Query) -> None:
        self.drafter, self.found, self.query = drafter, found, query

    def __call__(self, grown: Grown) -> tuple[Scored, Grown]:
        rows = grown.frontier.rows
        memory = of_rows(grown.records, grown.pool.parents[:, rows])
        tokens = grown.pool.tokens[:, rows]
        scored, own = self.scored(tokens, memory, grown.levels)
        records = grown.records.at[:, 1 + rows].set(own)
        passes = grown.passes + 1
        return scored, replace(grown, records=records, passes=passes)

    def scored(
        self, previous: jax.Array, memory: jax.Array, depth: jax.Array
    ) -> tuple[Scored, jax.Array]:
        """Scores the candidates of one level after each of Q previous tokens.

        All tokens that are not candidates keep the total probability that they have
        without pair scores.

        Args:
          previous: [B, Q] int32. Tokens of the level above.
          memory: [B, Q, r]. Memory of the parents of these tokens.
          depth: [] int32. Depth of these tokens; the root has depth 0.

        Returns:
          The best W candidates after each previous token, and the memory [B, Q, r] of
          these tokens.
        """
        found, dist, width = self.found, self.query.dist, self.query.width
        tables = found.hidden, found.tokens, found.scores, found.rest
        hidden, tokens, scores, rest = at_depth(tables, depth)
        pairs, memory = found.pairs_after(self.drafter, previous, memory, depth)
        heat = pair_temperature(dist, pairs.shape[0])
        scores = scores[:, None] + pairs / heat[:, None, None]
        among = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        total = jnp.logaddexp(among, rest[:, None, None])
        best, place = lax.top_k(scores, scores.shape[2])
        every = jnp.broadcast_to(tokens[:, None], scores.shape)
        guess = jnp.take_along_axis(every, place, axis=-1)
        sure = confidence(self.drafter, hidden, previous)
        if sure is not None and self.query.rule.drafting != "coupled":
            best, total = _with_confidence(best, sure)
        return Scored(best[..., :width], guess[..., :width], total), memory


def _with_confidence(best: jax.Array, sure: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replaces the candidates' scores by log-probabilities from the confidence head.

    The best candidate has the probability `sure`. The others share `RESCUED` times the
    remaining probability, in proportion to exp(score).

    Args:
      best: [B, Q, K]. Scores of the candidates in descending order.
      sure: [B, Q]. The confidence: the probability that the best one is accepted.

    Returns:
      The log-probabilities [B, Q, K], and [B, Q, 1] zeros, in place of the log-sum-exp
      of the scores.
    """
    sure = jnp.clip(sure, 1e-6, 1 - 1e-6)[..., None]
    others = jax.nn.log_softmax(best[..., 1:], axis=-1) + jnp.log(RESCUED * (1 - sure))
    value = jnp.concatenate([jnp.log(sure), others], axis=-1)
    return value, jnp.zeros_like(sure)


def readings(drafter: DFlash, target: ModelConfig) -> dict[str, DFlash]:
    """Returns variants of a drafter, each with one option changed that configs often
    state wrongly, by a description.

    The options are the layers of the target that it reads (one earlier or later), the
    slot of the first draft (one earlier or later), and which channels its rotary
    embedding pairs.
    """
    c = drafter.config
    found = {
        name: replace(drafter, config=replace(c, boundaries=moved))
        for name, moved in moved_boundaries(c.boundaries, target).items()
    }
    if c.slots > 1:
        other = replace(c, from_root=not c.from_root)
        name = "with drafts from the root's slot"
        if c.from_root:
            name = "without a draft from the root's slot"
        found[name] = replace(drafter, config=other)
    if c.attention.rope is not None:
        found["with the other rotary pairing"] = with_other_pairing(drafter)
    return found
