"""Katz back-off n-grams in hash tables on the device (Spector and Re 2023; Katz 1987).

N-grams predict the next token from the last n - 1 tokens by a table lookup. For a
context h that occurred in training, the table has the K likeliest tokens w with log
P(w|h). Other tokens have the probability

    P(w|h) = alpha(h) P(w|h'),  h' = h without its first token,

where alpha(h) makes the sum 1. For a context that did not occur, P(w|h) = P(w|h').
`training/ngrams.py` computes the probabilities from counts.

Letters: V tokens of the vocabulary, c tokens of a context (at most n - 1), S slots of a
table, K tokens of a slot, N = n K candidates.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Model, tree_nodes
from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import NGRAM, Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Update,
)
from stree_jax.speculation.drafters.model import by_slot
from stree_jax.speculation.drafters.stage import Task, first_unknown, make_task
from stree_jax.speculation.source import Source, Vocabulary
from stree_jax.speculation.tree import Topology, Tree

WAYS = 4  # number of adjacent slots in which a context may be stored
# Assumed rates, if they were not measured; see `NGrams.rates`.
ASSUMED_RATES = (0.45, 0.55, 0.6, 0.65)
EMPTY = -1  # token of an empty slot, or before the first token of the text


@register_for_export
@struct.dataclass
class Table:
    """A hash table of contexts of one length.

    Attributes:
      contexts: [S, c] int32. `EMPTY` for empty slots.
      tokens: [S, K] int32. The likeliest next tokens, best first, padded with `EMPTY`.
      log_prob: [S, K] float32. Their log-probabilities; -inf for padding.
      back_off: [S] float32. log alpha; 0 for empty slots.
    """

    contexts: jax.Array
    tokens: jax.Array
    log_prob: jax.Array
    back_off: jax.Array

    @property
    def slots(self) -> int:
        """S, a power of two."""
        return self.contexts.shape[0]


@struct.dataclass
class NGrams(DrafterBase):
    """An n-gram model. It can draft for the target or guess for a draft model.

    Attributes:
      unigram: [V] float32. log P(w).
      common: [K] int32. The likeliest tokens of `unigram`.
      tables: tables of contexts of 1 .. n - 1 tokens.
      temperature: temperature at which the counted text was sampled.
      rates: `rates[i]` is how often the draft model's likeliest token is among the
        first i + 1 guesses, in text that was not counted.
    """

    unigram: jax.Array
    common: jax.Array
    tables: tuple[Table, ...]
    temperature: float = struct.field(pytree_node=False, default=1.0)
    rates: tuple[float, ...] = struct.field(pytree_node=False, default=ASSUMED_RATES)
    cuts_back = True

    @classmethod
    def of(
        cls,
        unigram: jax.Array,
        tables: tuple[Table, ...],
        keep: int,
        temperature: float = 1.0,
    ) -> "NGrams":
        """Returns n-grams whose `common` are the K = `keep` likeliest tokens."""
        _, common = lax.top_k(unigram, min(keep, unigram.shape[0]))
        return cls(unigram, common, tables, temperature)

    def init(self, prompts: Prompts, past: DraftState | None) -> "Tail":
        return self.tail(prompts.token_ids, prompts.lengths)

    def tail(self, text: jax.Array, lengths: jax.Array) -> "Tail":
        """Returns the last n - 1 tokens of texts [B, S] with lengths [B]."""
        c = self.order - 1
        back = lengths[:, None] - c + jnp.arange(c, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(text, jnp.maximum(back, 0), axis=1)
        return Tail(jnp.where(back >= 0, tokens, EMPTY))

    def scale(self, dist: Distribution) -> jax.Array:
        """Returns [B, 1, 1] float32: factors of log P for rows that are sampled at
        another temperature than the counted text."""
        if dist.sampling is None:
            return jnp.ones((1, 1, 1), jnp.float32)
        own = jnp.where(dist.sampling.greedy, 1.0, dist.sampling.temperature)
        return (self.temperature / own)[:, None, None]

    def propose(
        self,
        state: "Tail",
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, "Tail"]:
        if tree.size == 1:
            return only_root(root), state
        task = make_task(tree, dist, rule)
        return self.begin(state, task.empty(root), task, task.tree.depth)

    def commit(self, state: "Tail", update: Update) -> "Tail":
        text = jnp.concatenate([state.tokens, update.tokens], axis=1)
        c = state.tokens.shape[1]
        last = update.length[:, None] + jnp.arange(c, dtype=jnp.int32)[None]
        return Tail(jnp.take_along_axis(text, last, axis=1))

    def begin(
        self, state: "Tail", draft: Draft, task: Task, ahead: int
    ) -> tuple[Draft, "Tail"]:
        root = jnp.zeros(draft.tokens.shape, bool).at[:, 0].set(True)
        return self._guess(state, draft, root, jnp.int32(0), task, ahead), state

    def fill(
        self, opened: "Tail", draft: Draft, known: jax.Array, task: Task, ahead: int
    ) -> tuple[Draft, "Tail"]:
        above = jnp.maximum(first_unknown(task, known) - 1, 0)
        return self._guess(opened, draft, known, above, task, ahead), opened

    def end(self, opened: "Tail") -> "Tail":
        return opened

    def _guess(
        self,
        tail: "Tail",
        draft: Draft,
        known: jax.Array,
        above: jax.Array,
        task: Task,
        ahead: int,
    ) -> Draft:
        """Fills `ahead` levels below the depth `above` [] int32, except `known`
        nodes."""
        tree, T = task.tree, task.tree.size
        for depth in (above + j for j in range(ahead)):
            nodes = task.levels.inner[jnp.minimum(depth, tree.depth - 1)]
            nodes = jnp.where(depth < tree.depth, nodes, T)
            children = self._after(tail, draft, nodes, task, tree.children)
            tokens, written = by_slot(children, nodes, tree, task.levels)
            written = written[None] & ~known
            assert draft.origin is not None  # set by `Task.empty`
            origin = jnp.where(written, jnp.uint8(NGRAM), draft.origin)
            tokens = jnp.where(written, tokens, draft.tokens)
            draft = replace(draft, tokens=tokens, origin=origin)
        return draft

    def others(
        self, tail: "Tail", draft: Draft, nodes: jax.Array, task: Task, count: int
    ) -> jax.Array:
        """Returns alternative tokens for nodes: the likeliest ones except the token
        that the node was filled with.

        Args:
          tail: the end of the text.
          draft: the tree.
          nodes: [Q] int32. Nodes whose parents are known; T for padding.
          task: the task of filling the tree.
          count: number of alternatives per node.

        Returns:
          Tokens [B, Q, count] int32, likeliest first.
        """
        node = jnp.minimum(nodes, task.tree.size - 1)
        most = task.tree.children + count
        tokens = self._after(tail, draft, task.parents[node], task, most)
        place = jnp.arange(count, dtype=jnp.int32)[None]
        own = task.levels.rank[node][:, None]
        place = place + (place >= own).astype(jnp.int32)  # skip the node's token
        return jnp.take_along_axis(tokens, place[None], axis=2)

    def _after(
        self, tail: "Tail", draft: Draft, nodes: jax.Array, task: Task, count: int
    ) -> jax.Array:
        """Returns the likeliest tokens [B, Q, count] after nodes [Q] of a tree. For
        padding (T) they are unspecified."""
        node = jnp.minimum(nodes, task.tree.size - 1)
        windows = tree_nodes(task.tree.rows(1), self.order - 1).window[0]  # [T, n - 1]
        text = jnp.concatenate([tail.tokens[:, :-1], draft.tokens], axis=1)
        noise = None
        if task.noise is not None:
            depth = jnp.minimum(task.depth[node], task.tree.depth - 1)
            noise = task.noise[:, depth]
        scale = self.scale(task.dist)
        return likeliest(self, text[:, windows[node]], count, scale, noise)

    @property
    def lookup_bytes(self) -> int:
        """Bytes read by one lookup of a context, in the tables of all lengths."""
        K = self.common.shape[0]
        return sum(4 * (WAYS * t.contexts.shape[1] + 2 * K + 1) for t in self.tables)

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.unigram.shape[0]

    @property
    def order(self) -> int:
        """n."""
        return len(self.tables) + 1

    def __repr__(self) -> str:
        slots = " + ".join(f"{table.slots:,}" for table in self.tables)
        return f"NGrams(order {self.order}, {self.num_tokens} tokens, {slots} slots)"


@struct.dataclass
class NGramsSource(Source):
    """N-grams that draft for the target."""

    value: NGrams
    name = "n-grams"
    has_q = False

    def check_tree(self, tree: Topology) -> None:
        check_fixed(tree)

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        yield Vocabulary("n-grams", self.value.num_tokens, None)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return self.value


register_for_export(NGrams, read=lambda values: (values[0], tuple(values[1])))


def check_fixed(tree: Topology) -> None:
    """Raises ValueError unless the tree is static."""
    if not isinstance(tree, Tree):
        raise ValueError(
            "tree: n-grams fill a fixed tree, alone or for a drafter, such as 'E' or "
            "'chain:4'; beams and 'auto' want a model"
        )


@register_for_export
@struct.dataclass
class Tail:
    """The state of `NGrams`: the end of the text.

    Attributes:
      tokens: [B, n - 1] int32. The last tokens, including the root of the next tree;
        `EMPTY` before the first token of the text.
    """

    tokens: jax.Array


def first_slot(contexts: jax.Array, slots: int) -> jax.Array:
    """Returns the first [...] int32 of the `WAYS` slots in which contexts [..., c] may
    be stored."""
    number = jnp.zeros(contexts.shape[:-1], jnp.uint32)
    for token in jnp.moveaxis(contexts, -1, 0):
        number = (number ^ token.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        number = number ^ (number >> 15)
    number = (number * jnp.uint32(0x85EBCA6B)) >> 7
    return (number % jnp.uint32(slots // WAYS)).astype(jnp.int32) * WAYS


def find(table: Table, contexts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slots [...] int32 of contexts [..., c], and [...] bool, whether the
    table contains them."""
    at = first_slot(contexts, table.slots)
    stored = table.contexts.reshape(-1, WAYS, contexts.shape[-1])[at // WAYS]
    same = (stored == contexts[..., None, :]).all(axis=-1)
    return at + jnp.argmax(same, axis=-1).astype(jnp.int32), same.any(axis=-1)


def candidates(ngrams: NGrams, contexts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the likeliest next tokens by contexts of all lengths, longest first.

    Args:
      ngrams: the n-grams.
      contexts: [..., n - 1] int32. `EMPTY` before the first token of the text.

    Returns:
      Tokens [..., N] int32 and log P(w|h) [..., N] float32, which is -inf for repeated
      tokens and padding.
    """
    shape, K = contexts.shape[:-1], ngrams.common.shape[0]
    left = jnp.zeros(shape, jnp.float32)  # sum of log alpha so far
    tokens, log_prob = [], []
    for table in reversed(ngrams.tables):
        c = table.contexts.shape[1]
        slot, found = find(table, contexts[..., contexts.shape[-1] - c :])
        tokens.append(jnp.where(found[..., None], table.tokens[slot], EMPTY))
        log_prob.append(left[..., None] + table.log_prob[slot])
        left = left + jnp.where(found, table.back_off[slot], 0.0)
    common, chance = ngrams.common, ngrams.unigram[ngrams.common]
    tokens.append(jnp.broadcast_to(common, (*shape, K)))
    log_prob.append(left[..., None] + jnp.broadcast_to(chance, (*shape, K)))
    token, value = jnp.concatenate(tokens, -1), jnp.concatenate(log_prob, -1)
    same = token[..., :, None] == token[..., None, :]
    again = jnp.tril(same, -1).any(axis=-1)
    return token, jnp.where(again | (token == EMPTY), -jnp.inf, value)


def log_prob(ngrams: NGrams, contexts: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns log P(w|h) [...] float32 of tokens [...] after contexts [..., n - 1]."""
    left = jnp.zeros(tokens.shape, jnp.float32)
    value = ngrams.unigram[tokens]
    known = jnp.zeros(tokens.shape, bool)
    result = left
    for table in reversed(ngrams.tables):
        c = table.contexts.shape[1]
        slot, found = find(table, contexts[..., contexts.shape[-1] - c :])
        here = (table.tokens[slot] == tokens[..., None]) & found[..., None]
        own = jnp.where(here, table.log_prob[slot], -jnp.inf).max(axis=-1)
        result = jnp.where(known, result, left + own)
        known = known | here.any(axis=-1)
        left = left + jnp.where(found, table.back_off[slot], 0.0)
    return jnp.where(known, result, left + value)


def perturbed(
    ngrams: NGrams, contexts: jax.Array, scale: jax.Array, noise: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the likeliest next tokens, and scores that include the sampling noise of
    the model for which the n-grams guess.

    The model chooses the token with the largest log P / temperature + Gumbel noise. The
    same noise is added to the n-grams' log P, so that the best score guesses the token
    that the model will draw.

    Args:
      ngrams: the n-grams.
      contexts: [B, Q, n - 1] int32. The n - 1 tokens before each of Q positions.
      scale: [B or 1, 1, 1] float32. Factors of log P for the temperature, the result of
        `NGrams.scale`.
      noise: [B, Q or 1, V] float32. The model's Gumbel noise at these positions. If
        None, decoding is greedy and no noise is added.

    Returns:
      Tokens [B, Q, N] int32, the N candidates of each position as from `candidates`,
      and their scores scale * log P + noise [B, Q, N] float32.
    """
    token, value = candidates(ngrams, contexts)
    value = value * scale
    if noise is not None:
        noise = jnp.broadcast_to(noise, (*token.shape[:2], noise.shape[2]))
        value = value + jnp.take_along_axis(noise, jnp.maximum(token, 0), axis=2)
    return token, value


def likeliest(
    ngrams: NGrams,
    contexts: jax.Array,
    count: int,
    scale: jax.Array,
    noise: jax.Array | None,
) -> jax.Array:
    """Returns the tokens [B, Q, count] int32 that a model would most likely draw after
    contexts.

    Args:
      ngrams, contexts, scale, noise: see `perturbed`.
      count: number of tokens per context.
    """
    token, value = perturbed(ngrams, contexts, scale, noise)
    short = max(count - token.shape[-1], 0)
    _, best = lax.top_k(value, min(count, token.shape[-1]))
    token = jnp.maximum(jnp.take_along_axis(token, best, axis=-1), 0)
    return jnp.pad(token, ((0, 0), (0, 0), (0, short)))
