"""Test that random numbers equal those of `jax.random`, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.sampling.threefry import fold_in, gumbel


@pytest.mark.parametrize("size", [1, 47, 2048])
def test_noise_matches_jax(size):
    keys = jax.random.split(jax.random.key(3), 5)
    own = jax.jit(jax.vmap(lambda key: gumbel(key, size)))(keys)
    want = jax.jit(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)
    np.testing.assert_array_equal(own, want)
    assert np.isfinite(own).all()


def test_fold_in_matches_jax():
    key, numbers = jax.random.key(2**40 + 5), jnp.asarray([0, 1, 7, 2**31 - 1])
    own = jax.vmap(fold_in, in_axes=(None, 0))(key, numbers)
    want = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(want))
