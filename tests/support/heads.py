"""Medusa heads with random weights, and their logits in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models.drafters.heads import Heads, HeadsConfig, init_heads
from tests.support.tiny import perturbed, tiny


def repeating():
    """Returns a target that soon repeats itself, as small models do."""
    model = tiny(1, layers=("mamba", "attention"))
    return model.replace(params=perturbed(model.params, 0.3, 3))


def random_heads(model, seed=0, scale=0.2, dtype=jnp.float32, **options):
    """Returns random heads of a model.

    Without a separate output matrix, they mostly predict the model's own next token.
    """
    c = model.config
    config = HeadsConfig(c.d_model, c.vocab_size, **options)
    params = init_heads(config, jax.random.key(seed), jnp.float32)
    params = perturbed(params, scale, seed)
    return Heads(jax.tree.map(lambda leaf: leaf.astype(dtype), params), config)


def reference_logits(heads, model, hidden):
    """Returns logits [..., K, V] in float64 for hidden states [..., d]."""
    c, p = heads.config, jax.tree.map(lambda x: np.asarray(x, np.float64), heads.params)
    own = "embedding" if model.config.tie_embeddings else "lm_head"
    shared = np.asarray(model.params[own], np.float64) / model.config.logits_divisor
    found = []
    for k in range(c.heads):
        h = np.asarray(hidden, np.float64)
        for i in range(c.blocks):
            block = p[f"head_{k}"][f"block_{i}"]
            z = h @ block["weight"].T + block.get("bias", 0)
            h = h + z / (1 + np.exp(-z))
        output = p[f"head_{k}"]["output"]["weight"] if c.own_output else shared
        found.append(h @ output.T)
    return np.stack(found, axis=-2)
