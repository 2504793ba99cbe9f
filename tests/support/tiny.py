"""Tiny random models for tests that need no checkpoint."""

import jax
import jax.numpy as jnp

from stree_jax.checkpoints.load import Model
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    init_params,
)
from stree_jax.models.config import named

VOCAB, REAL, STOP = 50, 47, 7  # three rows of the vocabulary are padding


def tiny(seed, layers=("mamba", "mlp", "attention", "mlp", "mamba"), d_model=32):
    config = ModelConfig(
        vocab_size=VOCAB,
        num_tokens=REAL,
        d_model=d_model,
        layers=layers,
        tie_embeddings=True,
        stop_tokens=(STOP,),
        mixers=named(
            mamba=MambaConfig(4, 8, 16, n_groups=2, norm_groups=2),
            attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8)),
            mlp=MLPConfig(48),
        ),
    )
    params = init_params(config, jax.random.key(seed), jnp.float32)
    return Model(params=perturbed(params, 0.2, seed), config=config)


def perturbed(params, scale, seed):
    """Returns parameters with random noise added to every leaf."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return treedef.unflatten(noisy)


def too_much(*args):
    """Runs a program that needs more memory than a process can address."""
    return jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 48))())
