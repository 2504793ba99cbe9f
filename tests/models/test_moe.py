"""Test mixtures of experts in bfloat16, with all code paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import (
    MLPConfig,
    Model,
    ModelConfig,
    MoEConfig,
    cast_params,
    chain_nodes,
    forward_hidden,
    init_params,
    init_state,
)
from stree_jax.models.config import named


@pytest.mark.parametrize("latent", [0, 12])
@pytest.mark.parametrize("tokens", [1, 4])  # the experts' own weights; all experts'
def test_bfloat16_is_near_float32(latent, tokens):
    """XLA:CPU once could not compile it with a latent width (`BF16 x BF16 = F32`)."""
    form = {"gated": False, "activation": "relu2"}
    shared = MLPConfig(16, gated=False, activation="relu2")
    moe = MoEConfig(8, 2, 16, shared, "sigmoid", d_latent=latent, **form)
    config = ModelConfig(
        64,
        64,
        32,
        ("moe",),
        mixers=named(moe=moe),
    )
    wide = init_params(config, jax.random.key(0), jnp.float32)
    text = jnp.arange(tokens, dtype=jnp.int32)[None] + 7

    @jax.jit
    def hidden(params):
        nodes, state = chain_nodes(1, tokens, 1), init_state(config, 1, 1, jnp.float32)
        return forward_hidden(Model(params, config), state, text, nodes)[0]

    rounded = cast_params(config, wide, jnp.bfloat16)
    again = cast_params(
        config, rounded, jnp.float32
    )  # the same weights, other products
    np.testing.assert_allclose(hidden(rounded), hidden(again), atol=0.05)
