"""Test that `argmax` equals `jnp.argmax`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.base.argmax import argmax
from tests.support.native import use


@pytest.mark.parametrize("kernels", ["portable", "off"])
def test_it_equals_jnp_argmax(kernels, monkeypatch):
    """The first of equal values or of NaN; infinities; any number of axes."""
    use(monkeypatch, kernels)
    jax.clear_caches()
    z = np.random.default_rng(0).integers(-3, 3, (3, 5, 7)).astype(np.float32)
    z[0, 0], z[0, 1], z[0, 2], z[0, 3] = -np.inf, 2.0, np.inf, np.nan
    z[1, 0, 4:], z[1, 1, 2], z[1, 1, 5] = np.nan, np.inf, np.nan
    run = jax.jit(argmax)
    for each in (z, z[0], z[2, 4], z[..., :1], z.astype(jnp.bfloat16)):
        each = jnp.asarray(each)
        ours, wanted = run(each), jnp.argmax(each, axis=-1)
        assert ours.dtype == jnp.int32
        np.testing.assert_array_equal(ours, wanted)
