"""Test that the kernels' noise is that of `jax.random`, and their largest scores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.sampling.best import best_drawn, best_scores
from stree_jax.sampling.threefry import noise
from tests.support.native import built, each_level, use

pytestmark = built


def keys_and_numbers(seed, folds):
    words = jax.random.key_data(jax.random.split(jax.random.key(seed), 5))
    numbers = np.random.default_rng(seed).integers(0, 2**31 - 1, (5, folds))
    return words, jnp.asarray(numbers, jnp.int32)


def of_jax(words, numbers, size):
    def one(words, numbers):
        key = jax.random.wrap_key_data(words)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.gumbel(key, (size,))

    return jax.jit(jax.vmap(one))(words, numbers)


@each_level
@pytest.mark.parametrize("size", [1, 16, 47, 20000])  # the last is cut for threads
@pytest.mark.parametrize("folds", [0, 2])
def test_noise_matches_jax(level, size, folds, monkeypatch):
    """Two logarithms have errors of two units in the last place each."""
    use(monkeypatch, level)
    args = keys_and_numbers(size, folds)
    run = jax.jit(lambda *args: noise(*args, size=size))
    assert "stree_noise" in run.lower(*args).as_text()
    ours, wanted = run(*args), of_jax(*args, size)
    np.testing.assert_allclose(ours, wanted, rtol=3e-7, atol=6e-7)


def test_noise_under_vmap():
    words, numbers = keys_and_numbers(3, 1)
    run = jax.jit(jax.vmap(lambda w, n: noise(w[None], n[None], size=33)[0]))
    assert "stree_noise" in run.lower(words, numbers).as_text()
    np.testing.assert_array_equal(run(words, numbers), noise(words, numbers, size=33))


@each_level
@pytest.mark.parametrize("size", [1, 5, 16, 17, 131])
def test_the_largest_scores(level, size, monkeypatch):
    """Of equal scores the first; also if all or nearly all are minus infinity."""
    use(monkeypatch, level)
    rng = np.random.default_rng(size)
    scores = (30 * rng.standard_normal((4, 3, size))).round().astype(np.float32)
    scores += 0.0  # to `lax.top_k` -0 is less
    scores[1, :, 1:] = -np.inf
    scores[2, 0], scores[2, 1] = 0.0, -np.inf
    args = jnp.asarray(scores)
    for count in {1, min(3, size), size}:
        run = jax.jit(lambda z, n=count: best_scores(z, count=n))
        assert "stree_best" in run.lower(args).as_text()
        ours, wanted = (
            run(args),
            jax.jit(partial(best_scores.definition, count=count))(args),
        )
        np.testing.assert_array_equal(ours[0], wanted[0])
        np.testing.assert_array_equal(ours[1], wanted[1])
        np.testing.assert_allclose(ours[2], wanted[2], rtol=1e-6, atol=1e-6)


def test_one_row_uses_xla():
    scores = jnp.asarray([3.0, 1.0, 3.0])
    best, place, _ = best_scores(scores, count=2)
    np.testing.assert_array_equal(best, [3.0, 3.0])
    np.testing.assert_array_equal(place, [0, 2])


@each_level
@pytest.mark.parametrize("size", [2, 16, 131])
def test_the_largest_sampled_scores(level, size, monkeypatch):
    """With a greedy row without noise, and rows with one possible token or none."""
    use(monkeypatch, level)
    rng = np.random.default_rng(size)
    logits = 30 * rng.standard_normal((4, 3, size)).astype(np.float32)
    logits[1, :, 1:] = -np.inf
    logits[2, 0, :-1] = -np.inf
    noise = rng.standard_normal((4, size)).astype(np.float32)
    heat = np.asarray([1.0, 1e-30, 0.7, 0.0], np.float32)
    args = [jnp.asarray(x) for x in (logits, heat, noise)]
    for count in sorted({1, 2, min(3, size)}):
        run = jax.jit(lambda *args, n=count: best_drawn(*args, count=n))
        assert "stree_best_drawn" in run.lower(*args).as_text()
        ours, wanted = (
            run(*args),
            jax.jit(partial(best_drawn.definition, count=count))(*args),
        )
        np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(ours[1], wanted[1])
        np.testing.assert_allclose(ours[2], wanted[2], rtol=1e-5, atol=1e-5)


STRANGE = {
    "one NaN": {3: np.nan},
    "two NaNs": {1: np.nan, 18: np.nan},
    "the last is NaN": {18: np.nan},
    "NaN and infinity": {0: np.inf, 7: np.nan},
    "infinity": {5: np.inf},
    "two infinities": {5: np.inf, 17: np.inf},
    "all NaN": dict.fromkeys(range(19), np.nan),
    "minus infinity": {2: -np.inf},
}


@each_level
@pytest.mark.parametrize("strange", STRANGE)
def test_scores_that_are_not_finite(level, strange, monkeypatch):
    """NaN counts as larger than all numbers, as in jax.lax.top_k, and makes sums
    NaN."""
    use(monkeypatch, level)
    scores = np.linspace(-3, 3, 19, dtype=np.float32)[None, None]
    for place, value in STRANGE[strange].items():
        scores[..., place] = value
    for count in (1, 2, 5):
        run = jax.jit(partial(best_scores, count=count))
        best, places, total = run(scores)
        wanted, at = jax.lax.top_k(jnp.asarray(scores), count)
        np.testing.assert_array_equal(places, at)
        np.testing.assert_array_equal(best, wanted)
        whole = jax.nn.logsumexp(scores[0, 0])
        np.testing.assert_allclose(total[0, 0, 0], whole, rtol=1e-6)
        if count > 2:  # inf - inf is a NaN with a sign, the smallest to lax.top_k
            continue
        for temperature in (0.0, 0.7):
            drawing = jnp.asarray(scores), jnp.float32([temperature]), jnp.ones((1, 19))
            drawn = jax.jit(partial(best_drawn, count=count))(*drawing)
            defined = best_drawn.definition(*drawing, count=count)
            np.testing.assert_array_equal(drawn[1], defined[1])
            np.testing.assert_allclose(drawn[0], defined[0], rtol=1e-5)
