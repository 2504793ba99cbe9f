"""Logits of a text that is read in passes of a given number of nodes."""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    chain_nodes,
    commit,
    forward_tree,
    init_state,
    param_dtype,
)


def logits_of_chain(model, text, T):
    """Returns logits [S, V] of a text [S], read in passes of T nodes. T must
    divide S."""

    @jax.jit
    def read(model, state, tokens):
        nodes = chain_nodes(1, T, model.config.conv_taps, "tree")
        logits, records = forward_tree(model, state, tokens, nodes)
        return logits, commit(state, records, nodes.depth, jnp.full((1,), T, jnp.int32))

    state = init_state(model.config, 1, len(text), param_dtype(model.params))
    found = []
    for tokens in jnp.asarray(text, jnp.int32).reshape(-1, 1, T):
        logits, state = read(model, state, tokens)
        found.append(logits[0])
    return np.concatenate(found)
