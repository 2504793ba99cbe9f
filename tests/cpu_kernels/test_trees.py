"""Test that the bookkeeping of trees in C++ matches that in JAX: integers are equal,
and values agree up to float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stree_jax.models import tree_nodes
from stree_jax.models.base.argmax import argmax
from stree_jax.models.layers.nodes import NO_NODE, _tree_tables
from stree_jax.speculation import layout
from stree_jax.speculation.accept import likeliest_path
from stree_jax.speculation.adaptive import pool
from stree_jax.speculation.adaptive.best_first import nothing_grown, with_level
from stree_jax.speculation.adaptive.pool import (
    KINDS,
    Pool,
    best_tree,
    merged,
    no_candidates,
    without_rest,
)
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafters.lookup import History, look_up
from stree_jax.speculation.tree import Auto, Beam, Budget, chain
from tests.support.native import assert_same, built, in_place, use
from tests.support.reference import random_parents

pytestmark = built


@pytest.fixture(params=range(2))
def rng(request):
    return np.random.default_rng(request.param)


@pytest.mark.parametrize("shape", [(1, 2), (2, 7), (3, 16), (2, 40)])
@pytest.mark.parametrize("taps", [1, 4, 9])
def test_tree_nodes(shape, taps, rng, both):
    parents = jnp.asarray(random_parents(rng, *shape))
    assert_same(*both(lambda parents: tree_nodes(parents, taps), parents))


def test_forests_have_several_roots(rng, both):
    parents = random_parents(rng, 3, 12)
    parents[:, [4, 7]] = -1
    assert_same(*both(lambda parents: tree_nodes(parents, 4), jnp.asarray(parents)))


@pytest.mark.parametrize("size", [2, 16, 33])
def test_tree_layout(size, rng, both):
    """Trees that are too deep or have too many children are cut in the same way."""
    parents = jnp.asarray(random_parents(rng, 3, size))
    for depth in (1, 4, size - 1):
        tree = Budget(size, depth)
        assert_same(*both(lambda z, t=tree: layout.tree_layout(t, z), parents))
    beam = Beam(3, 5)
    parents = jnp.asarray(random_parents(rng, 2, beam.size))
    assert_same(*both(lambda z: layout.tree_layout(beam, z), parents))


def test_a_tree_of_only_the_root_has_no_kernel(monkeypatch):
    """In plain decoding the tables are constants, which a call would hide from XLA."""
    use(monkeypatch, "portable")

    def tables(parents):
        return tree_nodes(parents, 4), layout.tree_layout(chain(0), parents)

    alone = jnp.full((2, 1), -1, jnp.int32)
    assert "stree_" not in jax.jit(tables).lower(alone).as_text()


@pytest.mark.parametrize("tokens", [2, 5, 300])
def test_look_up(tokens, rng, both):
    """Texts of any length that match everywhere, sometimes or never."""
    room = 60
    text = jnp.asarray(rng.integers(0, tokens, (6, room)), jnp.int32)
    length = jnp.asarray([1, 2, 3, 20, room - 1, room], jnp.int32)
    probability = jnp.asarray(rng.uniform(0.05, 1, KINDS), jnp.float32)
    for depth in (1, 6, 15):
        asked = History(text, length), probability
        for room in (0, 5):
            assert_same(
                *both(lambda text, p, d=depth, r=room: look_up(text, p, d, r), *asked)
            )


def test_look_up_in_earlier_texts(rng, both):
    """Texts of any length, short and long, with separators anywhere."""
    text = jnp.asarray(rng.integers(-1, 4, (6, 200)), jnp.int32)
    text = text.at[:, 120:].set(jnp.abs(text[:, 120:])).at[0, :120].set(-1)
    length = 120 + jnp.asarray([1, 2, 3, 20, 79, 80], jnp.int32)
    probability = jnp.asarray(rng.uniform(0.05, 1, KINDS), jnp.float32)
    for depth in (1, 15):
        asked = History(text, length, 120), probability
        assert_same(*both(lambda text, p, d=depth: look_up(text, p, d, 5), *asked))


def some_pool(rng, batch, count):
    """Returns a pool with many equal paths and values, and values of 0."""
    parents, value = np.zeros((2, batch, count))
    for b, c in np.ndindex(batch, count):
        parents[b, c] = above = rng.integers(0, c + 1)
        most = value[b, above - 1] if above else 1.0
        value[b, c] = most * rng.choice([0, 0.25, 0.5, 1])

    def drawn(most):
        return rng.integers(0, most, (batch, count))

    return Pool(
        tokens=jnp.asarray(drawn(99), jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        value=jnp.asarray(value, jnp.float32),
        kind=jnp.asarray(drawn(KINDS), jnp.int32),
        path=jnp.asarray(drawn(12), jnp.uint32),
        guessed=jnp.asarray(drawn(2) > 0),
    )


def test_argmax(rng, both):
    """Many rows shared by threads; of equal values or NaN, the first."""
    z = rng.integers(-9, 9, (3, 5, 5000)).astype(np.float32)
    z[0, 1, 4999], z[1, 2, 4], z[1, 2, 77], z[2, 4] = 99.0, np.nan, np.nan, -np.inf
    ours, wanted = both(argmax, jnp.asarray(z))
    np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(ours, np.argmax(z, axis=-1))


def test_gains(rng, both):
    """For equal values, for 0 values, and for more values than there are."""
    for count in (1, 7, 24):
        value = some_pool(rng, 3, count).value.at[2].set(0.0)
        assert_same(*both(lambda z: pool.gains(z, np.array([0, 3, 7, 15])), value))


def test_merged(rng, both, monkeypatch):
    for counts in ((9, 7), (1, 12), (12, 1)):
        first, second = (some_pool(rng, 3, count) for count in counts)
        roomy = pool.joined(first, some_pool(rng, 3, counts[1]))  # whatever is there
        use(monkeypatch, "portable")
        assert in_place(merged, roomy, second) == 6
        assert_same(*both(merged, roomy, second))


@pytest.mark.parametrize("size", [2, 5, 16, 30])  # fewer and more than candidates
def test_best_tree(size, rng, both):
    candidates, root = some_pool(rng, 3, 20), jnp.asarray([5, 6, 7], jnp.int32)
    tree = Budget(size, size - 1)
    ours, wanted = both(lambda z, root: best_tree(z, root, tree), candidates, root)
    assert_same(ours, wanted)
    assert (np.asarray(ours[0].kind) != pool.NO_KIND).any()  # there are nodes


def test_no_candidates_give_a_tree_of_only_the_root(both):
    tree, root = Auto().menu[-1], jnp.asarray([3], jnp.int32)
    assert_same(*both(lambda root: best_tree(no_candidates(1, 1), root, tree), root))


@pytest.mark.parametrize(
    "width, depth, taps, ahead", [(3, 5, 4, 0), (1, 3, 1, 0), (4, 2, 2, 5)]
)
@pytest.mark.parametrize("alike", [False, True])
def test_levels(width, depth, taps, ahead, alike, rng, both):
    """Level after level; capacity past the candidates does not change."""
    start, batch = nothing_grown(None, 2, width, depth, ahead), 2
    window = jnp.broadcast_to(jnp.arange(taps) - 1, (batch, width, taps))
    room = jnp.full((batch, width * depth + ahead, taps), 7)
    start = start.replace(
        frontier=start.frontier.replace(window=window.astype(jnp.int32)),
        nodes=start.nodes.replace(window=room.astype(jnp.int32)),
    )
    asked = 1 if alike else width
    scores = 3 * rng.normal(size=(depth, batch, asked, 50))
    probability = jnp.asarray(rng.uniform(0.05, 1, KINDS), jnp.float32)

    def all_levels(grown, scores, probability):
        for level in scores:
            best, guess = lax.top_k(level, width)
            total = jax.nn.logsumexp(level, axis=-1, keepdims=True)
            grown = with_level(grown, best, guess, total, probability)
        return grown

    asked = start, jnp.asarray(scores, jnp.float32), probability
    assert_same(*both(all_levels, *asked))


def test_levels_under_vmap(rng, monkeypatch):
    use(monkeypatch, "portable")
    start = nothing_grown(None, 2, 3, 5)
    scores = jnp.asarray(rng.normal(size=(2, 2, 3, 50)), jnp.float32)

    def grown(scores):
        after = start
        for _ in range(2):
            best, guess = lax.top_k(scores, 3)
            total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            worth = jnp.linspace(0.1, 0.9, KINDS)
            after = with_level(after, best, guess, total, worth)
        return after.pool

    mapped = jax.jit(jax.vmap(grown))
    assert in_place(mapped, scores) == 2 * 12
    one = jax.tree.map(lambda z: z[1], mapped(scores))
    assert_same(one, jax.jit(grown)(scores[1]))


def test_impossible_tokens(both):
    """Scores of -inf have the worst kind; a single possible token has the best."""
    start = nothing_grown(None, 1, 3, 2)
    scores = jnp.full((1, 1, 9), -jnp.inf).at[0, 0, 4].set(0.0)

    def one(grown, scores):
        best, guess = lax.top_k(scores, 3)
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return with_level(grown, best, guess, total, jnp.linspace(0.1, 0.9, KINDS))

    ours, wanted = both(one, start, scores)
    assert_same(ours, wanted)
    assert ours.pool.kind[0, :3].tolist() == [pool.MODEL_KINDS - 1, 0, 0]


def test_vmap_over_rows(rng, monkeypatch):
    """`jax.vmap` adds rows to one call, or runs the definition."""
    use(monkeypatch, "portable")
    parents = jnp.asarray(random_parents(rng, 6, 9)).reshape(3, 2, 9)
    mapped = jax.vmap(lambda z: tree_nodes(z, 4))(parents)
    flat = _tree_tables(parents.reshape(6, 9), conv_taps=4)
    for ours, wanted in zip(jax.tree.leaves(mapped), flat, strict=True):
        np.testing.assert_array_equal(ours.reshape(wanted.shape), wanted)
    text = jnp.asarray(rng.integers(0, 3, (3, 2, 30)), jnp.int32)
    length = jnp.full((3, 2), 25, jnp.int32)
    probability = jnp.asarray(rng.uniform(0.05, 1, (3, KINDS)), jnp.float32)

    def found(text, length, probability):
        return look_up(History(text, length), probability, 4).value

    mapped = jax.vmap(found)(text, length, probability)
    each = [found(*args) for args in zip(text, length, probability, strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(each), rtol=1e-6)


@pytest.mark.parametrize("taps", [1, 4])
def test_padding_rows(taps, rng, both):
    parents = random_parents(rng, 3, 9)
    for row, count in enumerate((9, 4, 1)):
        parents[row, count:] = NO_NODE
    args = jnp.asarray(parents)
    assert_same(*both(lambda z: tree_nodes(z, taps, has_padding=True), args))
    tree = Budget(9, 8)
    assert_same(*both(lambda z: layout.tree_layout(tree, z), args))


def likely_draft(rng, size, scores):
    """Returns a draft in which most tokens are the likeliest after their parents."""
    B, V = scores.shape[0], scores.shape[2]
    parents = random_parents(rng, B, size)
    best = np.argmax(scores, axis=-1)
    tokens = np.take_along_axis(best, np.maximum(parents, 0), axis=1)
    tokens = np.where(rng.random(parents.shape) < 0.3, rng.integers(0, V), tokens)
    made = layout.tree_layout(Budget(size, size - 1), jnp.asarray(parents))
    return Draft(made, jnp.asarray(tokens, jnp.int32))


@pytest.mark.parametrize(("size", "vocabulary"), [(1, 131), (2, 16), (9, 1), (24, 15)])
def test_greedy_paths(size, vocabulary, rng, both):
    """With equal scores, with minus infinity, without rows past a count, and with
    scores of tokens that only pad the vocabulary."""
    scores = rng.standard_normal((4, size, vocabulary + 3)).round(1).astype(np.float32)
    scores[..., vocabulary:] = 99.0
    scores[1, :, ::2] = -np.inf
    draft = likely_draft(rng, size, scores[..., :vocabulary])
    count = jnp.full(draft.tokens.shape[:1], max(size - 3, 1), jnp.int32)
    less = without_rest(draft, count)

    def accept(draft, scores):
        return likeliest_path(scores, draft.tokens, draft.layout, num_tokens=vocabulary)

    for one in (draft, less):
        assert_same(*both(accept, one, jnp.asarray(scores)))


def test_argmax_of_nan_is_the_first_nan(both):
    scores = jnp.zeros((1, 1, 40)).at[0, 0, 7].set(jnp.nan).at[0, 0, 33].set(jnp.nan)
    draft = only_root(jnp.zeros((1,), jnp.int32))

    def accept(scores):
        return likeliest_path(scores, draft.tokens, draft.layout, num_tokens=40).tokens

    assert_same(*both(accept, scores))
