"""Counts n-grams in text of a draft model, and makes Katz back-off tables (Katz 1987).

Let r be the count of an n-gram hw, n_r the number of n-grams with the count r, c(h) the
count of the context h, and k = 5. Then

    P(w|h) = d_r r / c(h),   d_r = 1 for r > k, else by Good and Turing
    d_r = (r*/r - m) / (1 - m),  r* = (r + 1) n_{r+1} / n_r,  m = (k + 1) n_{k+1} / n_1

The remaining probability is that of the shorter context; see
`speculation/drafters/ngrams.py`.

Letters: R rows of text, L tokens of a row, n the order, V tokens of the vocabulary, G
different n-grams of an order, c tokens of a context, S slots, K tokens of a slot.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from stree_jax.generation.tokens import generate_tokens
from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
    State,
    extend,
    init_state,
    logits_of,
    param_dtype,
    whole_blocks,
)
from stree_jax.models.base.argmax import argmax
from stree_jax.models.base.keys import key_of
from stree_jax.sampling.settings import Sampling, sampling_rows
from stree_jax.speculation.drafters.ngrams import (
    EMPTY,
    WAYS,
    NGrams,
    Table,
    first_slot,
    likeliest,
    log_prob,
)

DISCOUNTED = 5  # k; larger counts are not discounted
ROW = 256  # tokens per sampled text
TESTED_ROWS = 16  # number of texts in which `NGrams.rates` are measured
AT_ONCE = 2**18  # n-grams per lookup call
MAX_ORDER = 8


@dataclass(frozen=True)
class Grams:
    """The n-grams of one order, sorted by their tokens.

    Attributes:
      tokens: [G, c + 1] int32.
      count: [G] int64. At least 1.
    """

    tokens: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """The settings for making a table of n-grams.

    Attributes:
      tokens: minimum number of tokens of text to count.
      order: n.
      temperature: temperature at which the text is sampled.
      slots: maximum number of contexts of one length, a power of two.
      keep: K, the number of tokens stored per context.
      batch: number of texts sampled together.
      seed: seed of the random numbers.

    Raises:
      ValueError: a field is out of range; the message names it.
    """

    tokens: int = 10_000_000
    order: int = 3
    temperature: float = 1.5
    slots: int = 2**18
    keep: int = 8
    batch: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: want {low:g}..{high:g}, got {value}")

        check("tokens", 1, 2**40)
        check("order", 2, MAX_ORDER)
        check("temperature", 0.01, 100)
        check("slots", WAYS, 2**28)
        check("keep", 1, 64)
        check("batch", 1, 2**16)
        check("seed", 0, 2**32 - 1)
        if self.slots & (self.slots - 1):
            raise ValueError(f"slots: want a power of two, got {self.slots}")


def ngrams_of(drafter: Model, recipe: Recipe) -> NGrams:
    """Samples text from a draft model and returns its n-grams. Shows a progress bar."""
    V, r = drafter.config.num_tokens, recipe
    more = r.tokens + r.batch * ROW  # one more round, which is used to measure rates
    texts = list(sample_text(drafter, more, r.temperature, r.batch, r.seed))
    grams = count_grams(np.concatenate(texts[:-1]), r.order, V)
    ngrams = katz(grams, V, slots=r.slots, keep=r.keep, temperature=r.temperature)
    return replace(ngrams, rates=guess_rates(drafter, ngrams, texts[-1][:TESTED_ROWS]))


@jax.jit
def _ranks(drafter: Model, ngrams: NGrams, text: jax.Array) -> jax.Array:
    """Returns, after each token of a text, the rank that the draft model's likeliest
    next token has among the guesses of the n-grams.

    Args:
      drafter: the draft model.
      ngrams: the n-grams.
      text: [R, L] int32. L is a multiple of `PREFILL_CHUNK`.

    Returns:
      [R, L] int32. K if the token is not among the guesses.
    """
    R, L = text.shape
    state = init_state(drafter.config, R, whole_blocks(L), param_dtype(drafter.params))
    count, keep = jnp.full((R,), PREFILL_CHUNK, jnp.int32), ngrams.common.shape[0]
    scale, c = jnp.ones((1, 1, 1), jnp.float32), ngrams.order - 1
    before = jnp.pad(text, ((0, 0), (c - 1, 0)), constant_values=EMPTY)
    contexts = jnp.stack([before[:, k : k + L] for k in range(c)], axis=2)

    def read(state: State, at: jax.Array) -> tuple[State, jax.Array]:
        tokens, context = (
            lax.dynamic_slice_in_dim(x, at, PREFILL_CHUNK, axis=1)
            for x in (text, contexts)
        )
        hidden, state = extend(drafter, state, tokens, count)
        logits = logits_of(drafter, hidden)[..., : ngrams.num_tokens]
        guesses = likeliest(ngrams, context, keep, scale, None)
        right = guesses == argmax(logits)[..., None]
        return state, jnp.where(right.any(-1), jnp.argmax(right, -1), keep)

    _, ranks = lax.scan(read, state, jnp.arange(0, L, PREFILL_CHUNK, dtype=jnp.int32))
    return jnp.moveaxis(ranks, 0, 1).reshape(R, L)


def guess_rates(drafter: Model, ngrams: NGrams, text: np.ndarray) -> tuple[float, ...]:
    """Measures `NGrams.rates` in texts [R, L] int32 of the draft model."""
    whole = text[:, : text.shape[1] // PREFILL_CHUNK * PREFILL_CHUNK]
    ranks = np.asarray(_ranks(drafter, ngrams, jnp.asarray(whole)))
    keep = ngrams.common.shape[0]
    return tuple(round(float((ranks <= k).mean()), 4) for k in range(keep))


def sample_text(
    model: Model, tokens: int, temperature: float, batch: int, seed: int
) -> Iterator[np.ndarray]:
    """Samples texts from a model and yields them in batches [R, L] int32.

    Each text follows a uniformly drawn first token, which is not part of the text.

    Args:
      model: the model.
      tokens: total number of tokens, rounded up to whole batches.
      temperature: temperature of the sampling.
      batch: R.
      seed: seed of the random numbers.
    """
    V, rng = model.config.num_tokens, np.random.default_rng(seed)
    settings = [Sampling(temperature, seed=row) for row in range(batch)]

    @jax.jit
    def sample(model: Model, first: jax.Array, key: jax.Array) -> jax.Array:
        rows = sampling_rows(settings, key, 1)
        one = jnp.ones((batch,), jnp.int32)
        decoding = generate_tokens(
            model,
            first,
            one,
            drafter=None,
            max_new_tokens=ROW,
            stop_tokens=(),  # finished rows would have padding, which would be counted
            sampling=rows,
        )
        return decoding.tokens

    rounds = math.ceil(tokens / (batch * ROW))
    for step in tqdm(range(rounds), unit_scale=batch * ROW, unit=" tokens"):
        first = rng.integers(0, V, (batch, 1), np.int32)
        key = jax.random.fold_in(key_of(seed), step)
        yield np.asarray(sample(model, jnp.asarray(first), key))


def count_grams(text: np.ndarray, order: int, num_tokens: int) -> list[Grams]:
    """Returns the n-grams of the orders 1 .. n within the rows of texts [R, L].

    Args:
      text: [R, L] ints.
      order: n.
      num_tokens: V.

    Raises:
      ValueError: the rows are shorter than n.
    """
    if text.shape[1] < order:
        raise ValueError(f"order: {order}, but texts have {text.shape[1]} tokens")
    prefix, found = np.zeros(text.shape, np.int64), np.zeros((1, 0), np.int32)
    grams = []
    for k in range(order):
        last = text[:, k:].astype(np.int64)
        key = prefix[:, : last.shape[1]] * num_tokens + last
        unique, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
        token = (unique % num_tokens).astype(np.int32)[:, None]
        found = np.concatenate([found[unique // num_tokens], token], axis=1)
        prefix = inverse.reshape(key.shape)
        grams.append(Grams(found, count))
    return grams


def discounts(count: np.ndarray) -> np.ndarray:
    """Returns the Good-Turing discounts d_r for r = 0 .. k. They are 1 if the counts
    n_r do not give valid discounts."""
    n = np.bincount(np.minimum(count, DISCOUNTED + 2), minlength=DISCOUNTED + 3)
    d, r = np.ones(DISCOUNTED + 1), np.arange(1, DISCOUNTED + 1)
    if (n[1 : DISCOUNTED + 2] == 0).any():
        return d
    m = (DISCOUNTED + 1) * n[DISCOUNTED + 1] / n[1]
    if m >= 1:
        return d
    found = ((r + 1) * n[r + 1] / (n[r] * r) - m) / (1 - m)
    d[1:] = np.where((found > 0) & (found < 1), found, 1.0)
    return d


def discounted(grams: Grams) -> np.ndarray:
    """Returns the discounted counts d_r r [G] of n-grams."""
    d = discounts(grams.count)
    return d[np.where(grams.count <= DISCOUNTED, grams.count, 0)] * grams.count


def katz(
    grams: Sequence[Grams],
    num_tokens: int,
    *,
    slots: int,
    keep: int,
    temperature: float = 1.0,
) -> NGrams:
    """Makes the tables for counted n-grams.

    Args:
      grams: the n-grams of the orders 1 .. n.
      num_tokens: V.
      slots: maximum number of contexts of one length, a power of two. If contexts
        compete for slots, the most frequent ones are stored. Others back off.
      keep: K, the number of tokens stored per context (the likeliest ones).
      temperature: temperature at which the text was sampled.
    """
    p = np.zeros(num_tokens)
    p[grams[0].tokens[:, 0]] = discounted(grams[0]) / grams[0].count.sum()
    unseen = p == 0
    if unseen.any():
        p[unseen] = max(1 - p.sum(), 0) / unseen.sum()
    with np.errstate(divide="ignore"):
        unigram = np.log(p / p.sum()).astype(np.float32)
    model = NGrams.of(jnp.asarray(unigram), (), keep, temperature)
    for of_order in grams[1:]:
        table = _table(of_order, model, slots, keep)
        model = replace(model, tables=(*model.tables, table))
    return model


def _table(grams: Grams, shorter: NGrams, slots: int, keep: int) -> Table:
    """Returns the table of the contexts of one length, given the n-grams with shorter
    contexts."""
    c = grams.tokens.shape[1] - 1
    first = np.ones(len(grams.count), bool)  # marks the first n-gram of each context
    first[1:] = (grams.tokens[1:, :c] != grams.tokens[:-1, :c]).any(axis=1)
    group = np.cumsum(first) - 1
    contexts, seen = grams.tokens[first, :c], np.bincount(group, grams.count)
    p = discounted(grams) / seen[group]

    best = np.lexsort((grams.tokens[:, c], -p, group))
    starts = np.flatnonzero(first)
    rank = np.arange(len(best)) - starts[group[best]]
    best, rank = best[rank < keep], rank[rank < keep]
    tokens = np.full((len(contexts), keep), EMPTY, np.int32)
    chance = np.zeros((len(contexts), keep))
    tokens[group[best], rank] = grams.tokens[best, c]
    chance[group[best], rank] = p[best]

    place, fits = _places(contexts, seen, slots)
    slots = _slots(len(contexts), slots)
    place, contexts, tokens, chance = (
        x[fits] for x in (place, contexts, tokens, chance)
    )
    alpha = _back_off(contexts, tokens, chance, shorter)
    table = (
        np.full((slots, c), EMPTY, np.int32),
        np.full((slots, keep), EMPTY, np.int32),
        np.full((slots, keep), -np.inf, np.float32),
        np.zeros((slots,), np.float32),
    )
    with np.errstate(divide="ignore"):
        values = contexts, tokens, np.log(chance), np.log(alpha)
    for array, value in zip(table, values, strict=True):
        array[place] = value
    return Table(*map(jnp.asarray, table))


def _slots(contexts: int, most: int) -> int:
    """Returns the number of slots for a number of contexts: at least twice as many, a
    power of two, limited to `most`."""
    return min(most, max(2 ** math.ceil(math.log2(2 * contexts)), WAYS))


def _places(
    contexts: np.ndarray, seen: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a slot for each context, and whether it is stored there. Of the contexts
    with the same hash, the most frequent are stored."""
    slots = _slots(len(contexts), most)
    first = np.asarray(first_slot(jnp.asarray(contexts), slots))
    order = np.lexsort((np.arange(len(seen)), -seen, first))
    new = np.ones(len(order), bool)
    new[1:] = first[order][1:] != first[order][:-1]
    starts = np.flatnonzero(new)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - starts[np.cumsum(new) - 1]
    return first + rank, rank < WAYS


def _back_off(
    contexts: np.ndarray, tokens: np.ndarray, chance: np.ndarray, shorter: NGrams
) -> np.ndarray:
    """Returns alpha(h) = (1 - sum P(w|h)) / (1 - sum P(w|h')) of contexts h, summed
    over the stored tokens w."""
    low = np.zeros(chance.shape)
    suffixes = jnp.asarray(contexts[:, 1:])
    for k in range(tokens.shape[1]):
        for at in range(0, len(contexts), AT_ONCE):
            part = slice(at, at + AT_ONCE)
            known = jnp.maximum(jnp.asarray(tokens[part, k]), 0)
            value = np.asarray(log_prob(shorter, suffixes[part], known), np.float64)
            low[part, k] = np.where(tokens[part, k] == EMPTY, 0, np.exp(value))
    left, others = 1 - chance.sum(axis=1), 1 - low.sum(axis=1)
    remains = (left > 1e-9) & (others > 1e-9)
    return np.where(remains, left / np.where(remains, others, 1), 0.0)
