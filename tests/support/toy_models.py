"""Models with the toy mixer, and their texts."""

import jax
import jax.numpy as jnp

import stree_jax
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    init_params,
)
from stree_jax.models.stack.config import named
from tests.support.tiny import perturbed
from tests.support.toy_mixer import ToyConfig

PROMPTS = [[5, 9, 2, 5, 9, 2, 5, 9], [3, 8], [7, 1, 4, 7, 1]]
NEW = 20


def model_of(seed, noise=0.0):
    """Returns a model with toy mixers alone, beside Mamba2, and beside attention."""
    config = ModelConfig(
        vocab_size=48,
        num_tokens=47,
        d_model=32,
        layers=("toy", "mlp", "mamba+toy", "attention", "wide+small_toy"),
        mixers=named(
            toy=ToyConfig(24),
            small_toy=ToyConfig(8),
            mamba=MambaConfig(8, 8, 8, n_groups=2),
            attention=AttentionConfig(8, 2, 4, rope=Rope(50.0, 4)),
            wide=AttentionConfig(8, 8, 8),
            mlp=MLPConfig(48),
        ),
    )
    params = perturbed(init_params(config, jax.random.key(0), jnp.float32), 0.2, seed)
    if noise:
        params = perturbed(params, noise, seed + 1)
    return stree_jax.Model(params, config)


def text(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": NEW, "stop_tokens": ()} | options
    return stree_jax.generate(model, prompts, **options).tokens
