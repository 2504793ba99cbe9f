"""Test block drafters whose scores of pairs come from n-grams."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import WithNGrams
from stree_jax.speculation.drafters.block_candidates import Candidates
from stree_jax.speculation.drafters.ngram_pairs import LOWEST, fitted_pairs, ngram_pairs
from stree_jax.training.ngrams import count_grams, katz
from tests.speculation.auto import times
from tests.support.dflash import KINDS, random_dflash
from tests.support.drafting import random_prompts
from tests.support.tiny import tiny

NEW, AUTO = 16, "auto:1,4,8"
RULES = [("A", "naive"), (AUTO, "naive"), (AUTO, "naive/coupled")]
WITH_Q = [("chain:3", "leviathan"), ("A", "mss"), ("A", "recursive")]


def loop(q, p, pairs):
    """Returns J_k and exp(s_k), computed one pair after the other."""
    joint = np.zeros(pairs.shape)
    for b in range(len(p)):
        expected = sum(q[a] * pairs[a, b] for a in range(len(q)))
        for a in range(len(q)):
            joint[a, b] = q[a] * pairs[a, b] * p[b] / expected
    return joint, joint / joint.sum(axis=1, keepdims=True)


def test_fitting_keeps_the_marginals():
    rng = np.random.default_rng(0)
    above, below = rng.normal(size=(2, 3, 16)) * 2
    pairs = rng.normal(size=(3, 16, 16)) * 2
    args = (jnp.asarray(x, jnp.float32) for x in (above, below, pairs))
    fitted = np.exp(np.asarray(fitted_pairs(*args)))
    np.testing.assert_allclose(fitted.sum(axis=2), 1, atol=1e-5)
    for k in range(3):
        q, p = (np.exp(x[k]) / np.exp(x[k]).sum() for x in (above, below))
        joint, rows = loop(q, p, np.exp(pairs[k]))
        np.testing.assert_allclose(joint.sum(axis=0), p, atol=1e-9)
        np.testing.assert_allclose(fitted[k], rows, rtol=1e-4, atol=1e-6)


def test_impossible_tokens_and_pairs_give_no_nan():
    above = jnp.asarray([0.0, -jnp.inf, -jnp.inf])
    below = jnp.asarray([-1.0, 0.0, -jnp.inf])
    fitted = fitted_pairs(above, below, jnp.full((3, 3), -jnp.inf))
    assert np.isfinite(fitted).all() and fitted[0, 2] < LOWEST / 2
    np.testing.assert_allclose(np.exp(fitted[0, :2]), [0.2689, 0.7311], atol=1e-3)


# --- a world of pairs -----------------------------------------------------------------

TOKENS, LEVELS, NODES = 24, 6, 16


def tree_value(tables, truth):
    """Returns the expected number of accepted tokens of the best tree of `NODES`.

    Args:
      tables: for each level, [V, V] probabilities of the tokens after each token.
      truth: the same of the text.
    """
    paths = {
        (0,): (1.0, 1.0)
    }  # path -> its probability in the tables, and the true one
    found = []
    while len(found) < NODES:
        best = max(paths, key=lambda path: paths[path][0])
        value, real = paths.pop(best)
        found.append(real)
        if len(best) <= LEVELS:
            level = len(best) - 1
            for b in np.argsort(-tables[level][best[-1]])[:NODES]:
                more = tables[level][best[-1], b], truth[level][best[-1], b]
                paths[*best, int(b)] = value * more[0], real * more[1]
    return sum(found) - 1  # the root


def world_values(seed, noise):
    """Returns `tree_value` of marginals, of the fitted pairs and of the truth, in a
    random world in which each token depends on the one before."""
    rng = np.random.default_rng(seed)
    follows = 2.0 * rng.gumbel(size=(TOKENS, TOKENS))
    truth = [follows + rng.normal(size=TOKENS) for _ in range(LEVELS)]
    truth = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in truth]
    q = [truth[0][0]]
    for level in truth[1:]:
        q.append(q[-1] @ level)
    marginal = [np.tile(x, (TOKENS, 1)) for x in q]
    pairs = follows + noise * rng.normal(size=follows.shape)
    pairs -= np.log(np.exp(pairs).sum(axis=1, keepdims=True))
    q = np.log(q).astype(np.float32)
    table = np.broadcast_to(pairs, (LEVELS - 1, *pairs.shape)).astype(np.float32)
    fitted = np.exp(fitted_pairs(*map(jnp.asarray, (q[:-1], q[1:], table))))
    return [tree_value(x, truth) for x in (marginal, [marginal[0], *fitted], truth)]


def test_fitted_trees_beat_marginal_trees():
    good = np.mean([world_values(seed, 0) for seed in range(6)], axis=0)
    assert good[1] > 1.1 * good[0] and good[1] > 0.97 * good[2]
    wrong = np.mean([world_values(seed, 4) for seed in range(6)], axis=0)
    assert wrong[1] > 0.95 * wrong[0]  # though there is more noise than signal


# --- in the decoder -------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts([1, 5, 33])


@pytest.fixture(scope="module")
def write(target, prompts):
    plainly = dict(max_new_tokens=NEW, stop_tokens=(), drafter=None)
    return partial(stree_jax.generate, target, prompts, **plainly)


@pytest.fixture(scope="module")
def ngrams(target, prompts, write):
    """The n-grams of the target's greedy text."""
    return counted([np.asarray(write().tokens)], target.config.num_tokens)


def counted(texts, V, order=3):
    return katz(count_grams(np.concatenate(texts), order, V), V, slots=512, keep=4)


@pytest.fixture(scope="module")
def drafter(target, ngrams):
    return WithNGrams(random_dflash(target, **KINDS["dflash"]), ngrams)


def drafting(drafter, tree, rule):
    measured = dict(times=times()) if tree == AUTO else {}
    return dict(drafter=drafter, tree=tree, rule=rule) | measured


@pytest.mark.parametrize(("tree", "rule"), RULES)
def test_text_equals_plain_decoding(tree, rule, drafter, write):
    options = drafting(drafter, tree, rule)
    assert write(**options).tokens == write().tokens
    sampling = [Sampling(t, seed=4) for t in (0, 0.7, 1.5)]
    assert write(sampling=sampling, **options).tokens == write(sampling=sampling).tokens


@pytest.mark.parametrize(("tree", "rule"), WITH_Q)
def test_rules_with_q_run_and_repeat(tree, rule, drafter, write):
    """Their distribution is tested with those of the other block drafters."""
    options = drafting(drafter, tree, rule)
    sampling = Sampling(1.0, seed=3)
    one, other = (write(sampling=sampling, **options) for _ in range(2))
    assert one.tokens == other.tokens
    assert write(**options).tokens == write().tokens


def test_pairs_follow_the_ngrams():
    """After 1 comes 3, after 2 comes 4; but below the root 7 it is the other way
    round."""
    text = np.array([[8, 1, 3, 9, 2, 4] * 30 + [7, 1, 4, 7, 2, 3] * 8])
    tables = counted([text], 10)
    tokens = jnp.asarray([[[1, 2], [3, 4], [1, 2]]] * 2)
    scores = jnp.log(jnp.asarray([[[0.6, 0.3], [0.5, 0.3], [0.5, 0.5]]] * 2))
    roots, one = jnp.asarray([8, 7]), jnp.ones((1, 1, 1))
    pairs = jax.jit(ngram_pairs)(tables, roots, tokens, scores, one)
    assert not pairs[:, 0].any()
    best = np.asarray(scores[:, 1, None] + pairs[:, 1]).argmax(axis=-1)
    np.testing.assert_array_equal(best, [[0, 1], [1, 0]])
    total = np.exp(scores[:, 1, None] + pairs[:, 1]).sum(axis=-1)
    np.testing.assert_allclose(total, 0.8, atol=1e-5)

    zeros = jnp.zeros((2, 3, 2))
    found = Candidates(zeros, tokens, scores, scores, zeros[..., 0], pairs)
    previous = jnp.asarray([[2, 1, 2]] * 2)
    memory = jnp.zeros((2, 3, 0))
    rows, _ = found.pairs_after(None, previous, memory, jnp.int32(1))
    np.testing.assert_array_equal(rows, pairs[:, 1][:, jnp.asarray([1, 0, 1])])


def test_known_ngrams_are_accepted(target, write, ngrams):
    """A drafter that knows nothing: of its 16 candidates, n-grams choose."""
    plain = random_dflash(target, head_rows=16)
    flat = jnp.zeros_like(plain.params["head"])
    ids = jnp.unique(jnp.asarray(write().tokens), size=16, fill_value=0)
    plain = replace(plain, params=plain.params | {"head": flat}, ids=jnp.sort(ids))
    options = drafting(WithNGrams(plain, ngrams), "A", "naive")
    with_ngrams = write(**options).acceptance_length.mean()
    alone = write(**options | {"drafter": plain}).acceptance_length.mean()
    assert with_ngrams > alone


def test_what_does_not_fit_is_refused(target, write, drafter, ngrams):
    pairs = random_dflash(target, **KINDS["dspark"])
    for wrong, message in (
        (WithNGrams(pairs, ngrams), "DSpark drafter scores pairs of tokens itself"),
        (WithNGrams(target, ngrams), "for a DFlash drafter only"),
        (WithNGrams(drafter.drafter, "lookup"), "ngrams: want NGrams"),
    ):
        with pytest.raises(ValueError, match=message):
            write(drafter=wrong)


def test_a_draft_vocabulary_keeps_the_ngrams(target, drafter, write):
    fewer = stree_jax.drafters.with_draft_vocabulary(drafter, target, range(12))
    assert fewer.drafter.config.head_rows == 12 and fewer.ngrams is drafter.ngrams
    options = drafting(fewer, "A", "naive")
    assert write(**options).tokens == write().tokens
