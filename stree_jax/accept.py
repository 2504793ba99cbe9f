"""Acceptance rules: which path of a verified tree becomes text.

A rule is a pure function of the tree, its tokens and the target's logits. All of them
return the rows of the accepted nodes (the root first: it is text already, but the
target had not read it), how many they are, and the token that follows the last one.
"""

import jax
import jax.numpy as jnp

from stree_jax.models import Nodes
from stree_jax.tree import Layout


def greedy(
    layout: Layout, nodes: Nodes, tokens: jax.Array, best: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The longest path along which every token is the target's own choice.

    Args:
      layout, nodes: the tree of T nodes with longest path M.
      tokens: [B, T] int32, the tree's tokens.
      best: [B, T] int32, the target's most probable token after each node.

    Returns:
      path [B, M + 1] int32, rows of the accepted nodes, root first, padded with 0;
      length [B] int32, at least 1;
      next [B] int32, the bonus token.
    """
    root = layout.depth[None] == 0
    agrees = root | (tokens == best[:, layout.parents])
    accepted = (~nodes.mask | agrees[:, None, :]).all(axis=-1)
    depth = jnp.where(accepted, layout.depth[None], -1)
    chosen = jnp.argmax(depth, axis=1)
    following = jnp.take_along_axis(best, chosen[:, None], axis=1)[:, 0]
    return layout.paths[chosen], layout.depth[chosen] + 1, following
