"""Verifies a tree unrolled, as a baseline for packed verification: the path to each
leaf is a separate sequence with its own state.

A tree of T nodes is unrolled into its root-to-leaf paths. Tokens that paths share are
computed once for each path, and each path starts from a copy of the committed state.
Drafts, outputs and records are the same, so the rest of the loop is unchanged.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from stree_jax.models import (
    Model,
    Pending,
    State,
    Taps,
    chain_nodes,
    commit,
    forward_tapped,
    logits_of,
    tree_nodes,
)
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.step import Verified


def is_leaf(parents: jax.Array) -> jax.Array:
    """Marks the leaves [B, T] bool of trees with parents [B, T], -1 for the root."""
    batch, T = parents.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    parents = jnp.where(parents < 0, T, parents)
    return jnp.ones((batch, T), bool).at[row, parents].set(False, mode="drop")


@dataclass(frozen=True)
class Unrolled:
    """How to verify a tree as its paths: a `verify` of `stree_jax.speculation.step`.

    Attributes:
      leaves: R, sequences a row. A tree with fewer leaves is padded; of one with more,
        only the first are verified.
      scan: "step" processes tokens one by one, as a fused selective scan does on chip;
        "chunk" in chunks of a fixed length, as Mamba2's chunk scan.
    """

    leaves: int
    scan: Literal["step", "chunk"]

    def __call__(
        self,
        target: Model,
        state: State,
        draft: Draft,
        pending: Pending,
        taps: Taps = (),
        /,
    ) -> Verified:
        """Returns what `packed` does, by running the R root-to-leaf paths alone."""
        layout, config = draft.layout, target.config
        batch, T, M1 = layout.paths.shape
        R = self.leaves
        state = commit(state, pending.records, pending.path, pending.length)
        copies = jax.tree.map(lambda x: jnp.repeat(x, R, axis=0), state)

        row = jnp.arange(T, dtype=jnp.int32)[None]
        leaf = jnp.where(is_leaf(layout.parents), row, T)
        leaf = jnp.sort(leaf, axis=1)[:, :R]  # [B, R], padded with T
        b = jnp.arange(batch, dtype=jnp.int32)[:, None]
        paths = layout.paths.at[b, leaf].get(mode="fill", fill_value=0)  # [B, R, M + 1]
        tokens = jnp.take_along_axis(draft.tokens, paths.reshape(batch, -1), axis=1)
        tokens = tokens.reshape(batch * R, M1)
        chains = chain_nodes(batch * R, M1, config.conv_taps, self.scan)
        hidden, tapped, records, _ = forward_tapped(
            target, copies, tokens, chains, taps=taps
        )

        # A node is read off the first path that goes through it, at its depth.
        above = tree_nodes(layout.parents, config.conv_taps).mask
        through = above.at[b, leaf].get(mode="fill", fill_value=False)  # [B, R, T]
        place = jnp.argmax(through, axis=1) * M1 + layout.depth

        def by_node(z: jax.Array) -> jax.Array:
            """Gathers [B * R, M + 1, ...] by path as [B, T, ...] by node."""
            return z.reshape(batch, R * M1, *z.shape[2:])[b, place]

        hidden, tapped, records = jax.tree.map(by_node, (hidden, tapped, records))
        logits = logits_of(target, hidden)
        return Verified(hidden, logits, records, state, tapped)
