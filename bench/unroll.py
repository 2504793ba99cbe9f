"""The baseline that packed verification replaces: a sequence and a state per leaf.

A tree of T nodes is unrolled into its root-to-leaf paths. Tokens that paths share are
computed once a path, and each path starts from a copy of the committed state. Same
drafts, same outputs, and the same records, so that the rest of the loop cannot tell.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from stree_jax.models import (
    Model,
    Nodes,
    Pending,
    Records,
    State,
    chain_nodes,
    commit,
    forward_hidden,
)
from stree_jax.speculation.tree import Layout


@dataclass(frozen=True)
class Unrolled:
    """How to verify a tree as its paths.

    Attributes:
      leaves: R, sequences a row; a tree with more leaves than that is not verified
        whole, with fewer it is padded.
      scan: "step" goes through the tokens one by one (a fused selective scan does so
        on chip), "chunk" by chunks of a fixed length (Mamba2's own chunk scan).
    """

    leaves: int
    scan: Literal["step", "chunk"]


def verify_unrolled(
    model: Model,
    state: State,
    tokens: jax.Array,
    nodes: Nodes,
    pending: Pending,
    layout: Layout,
    unrolled: Unrolled,
) -> tuple[jax.Array, Records, State]:
    """`forward_hidden` of a tree, by running each of its R root-to-leaf paths alone.

    Args:
      tokens, nodes, layout: the tree, [B, T].

    Returns:
      as `forward_hidden`: hidden states and records of the T nodes, and the state
      after `pending`.
    """
    batch, T = tokens.shape
    R, M1 = unrolled.leaves, layout.paths.shape[2]
    state = commit(state, pending.records, pending.path, pending.length)
    copies = jax.tree.map(lambda x: jnp.repeat(x, R, axis=0), state)

    row = jnp.arange(T, dtype=jnp.int32)[None]
    is_leaf = (layout.kids == T).all(axis=-1)
    leaf = jnp.sort(jnp.where(is_leaf, row, T), axis=1)[:, :R]  # [B, R]
    b = jnp.arange(batch, dtype=jnp.int32)[:, None]
    paths = layout.paths.at[b, leaf].get(mode="fill", fill_value=0)  # [B, R, M + 1]
    path_tokens = jnp.take_along_axis(tokens, paths.reshape(batch, -1), axis=1)
    chains = chain_nodes(batch * R, M1, model.config.conv_taps, unrolled.scan)
    path_tokens = path_tokens.reshape(batch * R, M1)
    hidden, records, _ = forward_hidden(model, copies, path_tokens, chains)

    # A node is read off the first path that goes through it, at its depth.
    through = nodes.mask.at[b, leaf].get(mode="fill", fill_value=False)  # [B, R, T]
    place = jnp.argmax(through, axis=1) * M1 + layout.depth[None]

    def packed(z: jax.Array) -> jax.Array:
        """[B * R, M + 1, ...] by path to [B, T, ...] by node."""
        return z.reshape(batch, R * M1, *z.shape[2:])[b, place]

    return packed(hidden), jax.tree.map(packed, records), state
