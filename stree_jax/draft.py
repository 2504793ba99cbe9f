"""Drafting a token tree with a model, level by level through the same tree scan.

The drafter is fed the tokens that became text since its last call (a chain), and then
guesses below them. It keeps nothing of its guesses: what was accepted comes back as
text at the next call, so a rejected branch cannot leave a trace in its state.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models import (
    ModelConfig,
    Nodes,
    State,
    extend,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
)
from stree_jax.tree import Layout, Tree


def real_logits(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Logits [..., V] with the rows that pad the vocabulary at -inf."""
    if config.num_tokens == config.vocab_size:
        return logits
    return jnp.where(
        lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        < config.num_tokens,
        logits,
        -jnp.inf,
    )


def propose(
    config: ModelConfig,
    params: Any,
    state: State,
    fresh: jax.Array,
    count: jax.Array,
    tree: Tree,
    layout: Layout,
    nodes: Nodes,
) -> tuple[jax.Array, State]:
    """Fill a static tree with the drafter's most probable continuations.

    The r-th child of a node gets the r-th most probable token after it.

    Args:
      state: the drafter's, before the fresh tokens.
      fresh: [B, M + 1] int32, tokens new in the text; the last one is the tree's root.
      count: [B] int32, how many of them count; 0 for a finished row.
      tree, layout: the tree and its layout.
      nodes: `tree.drafted_nodes`, the tree below its root.

    Returns:
      tokens [B, T] of the tree's nodes, and the drafter's state after `fresh`.
    """
    batch = fresh.shape[0]
    last = jnp.maximum(count - 1, 0)[:, None]
    root = jnp.take_along_axis(fresh, last, axis=1)
    tokens = jnp.broadcast_to(root, (batch, tree.size))

    def children_of(tokens: jax.Array, hidden: jax.Array, depth: jax.Array):
        """Fill in the nodes at `depth` below parents with these hidden states."""
        logits = real_logits(config, logits_of(config, params, hidden))
        _, best = lax.top_k(logits, tree.children)  # [B, W, children]
        guess = best[:, layout.slot[layout.parents], layout.rank]
        return jnp.where(layout.depth[None] == depth, guess.astype(jnp.int32), tokens)

    hidden, state = extend(config, params, state, fresh, count)
    at_root = jnp.take_along_axis(hidden, last[..., None], axis=1)
    tokens = children_of(tokens, at_root, jnp.int32(1))

    def level(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        tokens, records = carry
        rows, depth = inputs
        hidden, records, _ = forward_hidden(
            config, params, state, tokens[:, rows], nodes, records=records, rows=rows
        )
        return (children_of(tokens, hidden, depth + 1), records), None

    records = init_records(config, batch, tree.size, param_dtype(params))
    depths = jnp.arange(1, tree.depth, dtype=jnp.int32)
    inner = (layout.levels[:-1], depths)
    (tokens, _), _ = lax.scan(level, (tokens, records), inner)
    return tokens, state
