"""A drafted tree of tokens.

Letters: B rows, T nodes, V tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.speculation.layout import Layout, tree_layout
from stree_jax.speculation.tree import chain

# Where a token of the text comes from: the target chose it, or who drafted it.
TARGET, DRAFTER, LOOKUP, NGRAM, STAGE = 0, 1, 2, 3, 4
ORIGINS = ("target", "drafter", "lookup", "n-gram", "inner drafter")


@struct.dataclass
class Draft:
    """A filled tree.

    Attributes:
      layout: of the B rows' trees.
      tokens: [B, T] int32.
      q: [B, T, V] float32, the probabilities that each inner node's children were
        drawn with, or None where the acceptance rule does not ask for them.
      origin: [B, T] uint8, who drafted each node; None: one drafter all of them.
      kind: [B, T] int32, see `pool.KINDS`; None where nodes were not valued.
      partly: whether rows of it may be no nodes: `models.nodes.NO_NODE`.
    """

    layout: Layout
    tokens: jax.Array
    q: jax.Array | None = None
    origin: jax.Array | None = None
    kind: jax.Array | None = None
    partly: bool = struct.field(pytree_node=False, default=False)


def only_root(root: jax.Array) -> Draft:
    """Returns the tree of plain decoding: the roots [B] themselves."""
    alone = jnp.full((root.shape[0], 1), -1, jnp.int32)
    return Draft(tree_layout(chain(0), alone), root[:, None])
