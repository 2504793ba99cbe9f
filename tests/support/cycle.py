"""A target that mostly repeats a cycle of tokens, and prepared text for training."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

import stree_jax
from stree_jax.training.corpus import train_tokenizer
from tests.support.tiny import tiny

CYCLE = 30  # tokens that the target repeats in turn


def cycling_target(layers=("mamba",)):
    """Returns a target that mostly repeats a cycle of tokens that occur in text."""
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, 280)
    size, model = tokenizer.get_vocab_size(), tiny(1, layers=layers)
    config = replace(
        model.config,
        vocab_size=size,
        num_tokens=size,
        stop_tokens=(0,),
        tie_embeddings=False,
    )
    table = np.random.default_rng(1).standard_normal((size, config.d_model))
    before = np.zeros((size, config.d_model))
    before[1 : CYCLE + 1] = np.roll(table[1 : CYCLE + 1], 1, axis=0)
    params = {
        **model.params,
        "embedding": jnp.asarray(4 * table, jnp.float32),
        "lm_head": jnp.asarray(before, jnp.float32),
    }
    return stree_jax.Model(params, config, tokenizer)


def write_text(target, folder):
    """Writes prepared tokens of the cycle, in random order."""
    target.tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(2)
    for name, count in (("train", 1500), ("heldout", 400)):
        np.save(
            folder / f"{name}.npy", rng.integers(1, CYCLE + 1, count).astype(np.uint16)
        )
    return folder
