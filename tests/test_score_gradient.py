"""Test that the gradient of `score` is its slope, by finite differences."""

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax
from stree_jax.models import PREFILL_CHUNK
from tests.support.tiny import tiny


def test_the_gradient_of_score_is_its_slope():
    """Along a random direction, over two chunks."""
    model = tiny(0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 47, (1, PREFILL_CHUNK + 3))
    weights = jnp.asarray(rng.normal(size=(1, tokens.shape[1], 50)), jnp.float32)
    leaves, tree = jax.tree.flatten(model.params)
    steps = [rng.normal(size=x.shape).astype(np.float32) for x in leaves]

    @jax.jit
    def value(size):
        moved = [x + size * step for x, step in zip(leaves, steps, strict=True)]
        params = jax.tree.unflatten(tree, moved)
        logits = stree_jax.score(model.replace(params=params), tokens)
        return (jax.nn.log_softmax(logits[..., :47]) * weights[..., :47]).mean()

    size = 5e-4
    slope = (value(jnp.float32(size)) - value(jnp.float32(-size))) / (2 * size)
    found = jax.jit(jax.grad(value))(jnp.float32(0))
    np.testing.assert_allclose(found, slope, rtol=1e-2)
