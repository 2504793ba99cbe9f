"""Test counts, discounts and back-off against plain Python and exact fractions."""

import math
from collections import Counter, defaultdict
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.speculation.drafters.ngrams import EMPTY, WAYS, first_slot, log_prob
from stree_jax.training.ngrams import (
    DISCOUNTED,
    ROW,
    count_grams,
    discounts,
    katz,
    sample_text,
)
from tests.support.tiny import REAL, STOP, tiny

V, ROWS, LENGTH = 40, 6, 400


def skewed(seed, rows=ROWS, length=LENGTH):
    """Returns texts [R, L] in which some tokens and pairs are much more frequent."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V + 1)
    text = rng.choice(V, (rows, length), p=p / p.sum())
    for t in range(1, length):
        again = rng.random(rows) < 0.3
        text[:, t] = np.where(again, (7 * text[:, t - 1] + 3) % V, text[:, t])
    return text.astype(np.int32)


def counted(text, order):
    """Returns a Counter of n-grams for each length 1 .. n."""
    rows = text.tolist()
    return [
        Counter(tuple(r[i : i + k]) for r in rows for i in range(len(r) - k + 1))
        for k in range(1, order + 1)
    ]


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("shape", [(ROWS, LENGTH), (5, 4), (1, 50)])
def test_counts_match_a_counter(order, shape):
    """No n-gram crosses the end of a row: a row of 4 tokens has one 4-gram."""
    text = skewed(order, *shape)
    grams = count_grams(text, order, V)
    assert len(grams) == order
    for found, expected in zip(grams, counted(text, order), strict=True):
        tokens = list(map(tuple, found.tokens.tolist()))
        assert tokens == sorted(set(tokens))
        assert dict(zip(tokens, found.count.tolist(), strict=True)) == expected


def good_turing(counts):
    """Returns the exact discounts d_1 .. d_k of a list of counts, or None if
    undefined."""
    n = Counter(counts)
    k = DISCOUNTED
    if not all(n[r] for r in range(1, k + 2)):
        return None
    m = Fraction((k + 1) * n[k + 1], n[1])
    if m >= 1:
        return None
    found = []
    for r in range(1, k + 1):
        best = Fraction((r + 1) * n[r + 1], n[r])  # r*
        d = (best / r - m) / (1 - m)
        found.append(d if 0 < d < 1 else Fraction(1))
    return found


def having(*n):
    """Returns counts of which n[0] are 1, n[1] are 2 and so on."""
    return np.repeat(np.arange(1, len(n) + 1), n)


COUNTS = {
    "falling": having(100, 40, 20, 12, 8, 5, 3, 1, 0, 2),
    "one is above 1": having(100, 40, 40, 12, 8, 5),
    "one is below 0": having(100, 40, 20, 12, 3, 8),
    "no more than needed": having(7, 1, 1, 1, 1, 1),
    "a text's": count_grams(skewed(9), 2, V)[1].count,
}


@pytest.mark.parametrize("name", COUNTS)
def test_discounts_are_good_turing(name):
    expected = good_turing(COUNTS[name].tolist())
    assert expected is not None
    found = discounts(COUNTS[name])
    assert found.shape == (DISCOUNTED + 1,) and found[0] == 1
    np.testing.assert_allclose(found[1:], np.array(expected, float), rtol=1e-12)
    if name != "no more than needed":
        assert (found < 1).any()
    if name.startswith("one"):
        assert (found[1:] == 1).any()


@pytest.mark.parametrize(
    "n",
    [
        (),
        (5,),
        (100, 40, 20, 12, 8),  # no count is 6
        (100, 40, 0, 12, 8, 5),
        (0, 40, 20, 12, 8, 5),
        (30, 20, 10, 8, 6, 5),  # m = 1
        (29, 20, 10, 8, 6, 5, 3),  # m > 1
    ],
)
def test_counts_without_discounts(n):
    assert good_turing(having(*n).tolist()) is None
    assert discounts(having(*n)).tolist() == [1] * (DISCOUNTED + 1)


class Katz:
    """Katz's model in plain dictionaries.

    Attributes:
      chance: {context: {token: P}} of the stored tokens.
      alpha: {context: factor of the shorter context's probabilities, for other tokens}.
    """

    def __init__(self, text, order, keep, kept):
        """Stores the contexts `kept`, with the `keep` likeliest tokens of each."""
        unigrams, *longer = counted(text, order)
        shares = self.shares(unigrams)
        total = sum(unigrams.values())
        p = {token: x / total for (token,), x in shares.items()}
        left, unseen = 1 - sum(p.values()), V - len(p)
        p = {w: p.get(w, left / max(unseen, 1)) for w in range(V)}
        self.unigram = {w: x / sum(p.values()) for w, x in p.items()}
        self.chance, self.alpha = {}, {}
        for counts in longer:
            self.add(counts, keep, kept)

    @staticmethod
    def shares(counts):
        """Returns d_r r for each n-gram."""
        d = good_turing(list(counts.values())) or [Fraction(1)] * DISCOUNTED
        d = [*map(float, d)]
        return {g: r * (d[r - 1] if r <= DISCOUNTED else 1) for g, r in counts.items()}

    def add(self, counts, keep, kept):
        """Adds the contexts of one length. Shorter ones must exist."""
        seen, found = Counter(), defaultdict(dict)
        for gram, r in counts.items():
            seen[gram[:-1]] += r
        for gram, x in self.shares(counts).items():
            found[gram[:-1]][gram[-1]] = x / seen[gram[:-1]]
        alpha = {}
        for h in found.keys() & kept:
            best = sorted(found[h].items(), key=lambda item: (-item[1], item[0]))
            self.chance[h] = dict(best[:keep])
            others = 1 - sum(self.p(w, h[1:]) for w in self.chance[h])
            left = 1 - sum(self.chance[h].values())
            assert left < 1e-9 or others > 0.02, "the text is too small to compare"
            alpha[h] = left / others if left > 1e-9 else 0.0
        self.alpha |= alpha

    def p(self, w, h):
        """Returns P(w|h)."""
        if not h:
            return self.unigram[w]
        if h in self.chance and w in self.chance[h]:
            return self.chance[h][w]
        return self.alpha.get(h, 1.0) * self.p(w, h[1:])


def contexts_of(table):
    return {tuple(h) for h in np.asarray(table.contexts).tolist() if EMPTY not in h}


def all_log_probs(ngrams, contexts):
    """Returns [H, V] float64 after contexts [H, n - 1]."""
    asked = jnp.asarray(np.repeat(contexts[:, None], V, axis=1))
    tokens = np.broadcast_to(np.arange(V, dtype=np.int32), asked.shape[:2])
    return np.asarray(jax.jit(log_prob)(ngrams, asked, tokens), np.float64)


def asked_contexts(text, order):
    """Returns contexts [H, n - 1]: from the text, random ones, and from its
    beginning."""
    c = order - 1
    seen = np.concatenate([text[:, i : i + c] for i in range(0, 120, 3)])
    rng = np.random.default_rng(4)
    begin = np.array([[EMPTY] * (c - k) + [3] * k for k in range(c)], np.int32)
    return np.concatenate([seen, rng.integers(0, V, (40, c), np.int32), begin])


CASES = {  # order, keep, slots
    "all tokens": (3, V, 2**12),
    "order 4": (4, V, 2**13),
    "two tokens": (3, 2, 2**12),
    "few slots": (3, V, 2**7),
    "few of both": (4, 3, 2**6),
}


@pytest.mark.parametrize("name", CASES)
def test_probabilities_match_katz(name):
    """For every token after every kind of context, and their sums."""
    order, keep, slots = CASES[name]
    text = skewed(5)
    grams = count_grams(text, order, V)
    ngrams = katz(grams, V, slots=slots, keep=keep)
    assert ngrams.order == order and ngrams.num_tokens == V
    kept = set().union(*map(contexts_of, ngrams.tables))
    exact = Katz(text, order, keep, kept)
    seen = {g[:-1] for counts in counted(text, order)[1:] for g in counts}
    assert kept <= seen
    # With half the slots empty, few contexts are dropped
    if not name.startswith("few"):
        assert len(kept) > 0.94 * len(seen)
    contexts = asked_contexts(text, order)
    found = all_log_probs(ngrams, contexts)
    for row, h in zip(found, map(tuple, contexts.tolist()), strict=True):
        p = np.array([exact.p(w, h) for w in range(V)])
        assert p.sum() == pytest.approx(1, abs=1e-9)
        assert np.exp(row).sum() == pytest.approx(1, abs=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(row, np.log(p), rtol=0, atol=1e-5)
    some = [table for table in ngrams.tables if np.asarray(table.back_off).any()]
    assert some, "nothing backs off, and the comparison is of counts alone"


def test_without_discounts_other_tokens_have_probability_zero():
    text = np.array([[0, 1] * 8 + [0, 2]], np.int32)  # counts above 5, and a few of 1
    ngrams = katz(count_grams(text, 2, V), V, slots=64, keep=4)
    found = np.exp(all_log_probs(ngrams, np.array([[0], [1], [3]], np.int32)))
    np.testing.assert_allclose(found[0, :3], [0, 8 / 9, 1 / 9], rtol=1e-6)
    np.testing.assert_allclose(found[1, :3], [1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found[2, :3], [9 / 18, 8 / 18, 1 / 18], rtol=1e-6)
    assert (found[:, 3:] == 0).all()


@pytest.mark.parametrize("keep", [1, 3])
def test_the_likeliest_tokens_are_kept(keep):
    """In order. Among equally likely tokens, the first is kept."""
    text = skewed(6)
    (table,) = katz(count_grams(text, 2, V), V, slots=256, keep=keep).tables
    shares = Katz.shares(counted(text, 2)[1])
    arrays = map(np.asarray, (table.contexts, table.tokens, table.log_prob))
    for h, tokens, chance in zip(*arrays, strict=True):
        own = [(-x, w) for (first, w), x in shares.items() if first == h[0]]
        best = [w for _, w in sorted(own)[:keep]]
        assert tokens.tolist() == best + [EMPTY] * (keep - len(best))
        assert (np.diff(chance[: len(best)]) <= 0).all()
        assert (chance[len(best) :] == -np.inf).all()


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_rare_contexts_are_dropped(slots):
    """Among contexts with the same slots, the most frequent are kept, in those
    slots."""
    text = skewed(7)
    table = katz(count_grams(text, 3, V), V, slots=slots, keep=2).tables[1]
    assert table.slots == slots
    seen = Counter()
    for gram, r in counted(text, 3)[2].items():
        seen[gram[:-1]] += r
    contexts = list(seen)
    first = first_slot(jnp.asarray(np.array(contexts, np.int32)), slots)
    wanted = dict(zip(contexts, np.asarray(first).tolist(), strict=True))
    places = {
        tuple(h): slot
        for slot, h in enumerate(np.asarray(table.contexts).tolist())
        if EMPTY not in h
    }
    assert all(0 <= slot - wanted[h] < WAYS for h, slot in places.items())
    assert len(places) < len(contexts)
    for begin in range(0, slots, WAYS):
        own = [h for h in contexts if wanted[h] == begin]
        kept = [seen[h] for h in own if h in places]
        lost = [seen[h] for h in own if h not in places]
        assert len(kept) == min(len(own), WAYS)
        assert not lost or max(lost) <= min(kept)


def test_the_number_of_slots():
    """Twice the number of contexts, rounded up to a power of two, up to the given
    limit."""
    text = skewed(8)
    grams = count_grams(text, 3, V)
    tables = katz(grams, V, slots=2**20, keep=1).tables
    for table, counts in zip(tables, counted(text, 3)[1:], strict=True):
        contexts = len({gram[:-1] for gram in counts})
        assert table.slots == 2 ** math.ceil(math.log2(2 * contexts))


@pytest.fixture(scope="module")
def model():
    return tiny(1, layers=("mamba",))


def sampled(model, tokens, seed=3, temperature=1.0):
    return list(sample_text(model, tokens, temperature, 3, seed))


def test_texts_have_the_given_length_and_repeat_by_seed(model):
    asked = 3 * ROW + 1
    texts = sampled(model, asked)
    assert [text.shape for text in texts] == [(3, ROW)] * 2
    whole = np.concatenate(texts)
    assert whole.size >= asked
    assert whole.min() >= 0 and whole.max() < REAL
    assert len({row.tobytes() for row in whole}) == len(whole)
    np.testing.assert_array_equal(np.concatenate(sampled(model, asked)), whole)
    assert not np.array_equal(sampled(model, ROW, seed=4)[0], texts[0])


def test_stop_tokens_do_not_end_sampled_texts(model):
    """Only tokens of the model are counted, and no padding."""
    (text,) = sampled(model, 3 * ROW)
    assert (text == STOP).any(), "the model must say it for this test to see anything"
    assert (text[:, -ROW // 4 :] != 0).any(axis=1).all()
