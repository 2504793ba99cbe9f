"""Test that predicted bytes equal allocated bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import init_params, init_state
from stree_jax.models.stack.sizes import state_bytes, weight_bytes
from tests.support.tiny import tiny


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layers", [("mamba",), ("mamba", "attention")])
def test_bytes(layers, dtype):
    config, dtype = tiny(0, layers=layers).config, np.dtype(dtype)
    params = init_params(config, jax.random.key(0), dtype)
    assert weight_bytes(config, dtype) == taken(params)
    for batch, capacity in ((1, 1), (3, 16)):
        state = init_state(config, batch, capacity, dtype)
        assert state_bytes(config, batch, capacity, dtype) == taken(state)


def taken(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
