"""A tree of draft tokens.

Letters: B rows, T nodes, V tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.speculation.layout import Layout, tree_layout
from stree_jax.speculation.tree import chain

# Origin of a token of the text: the target, or the source that drafted it.
TARGET, DRAFTER, LOOKUP, NGRAM, STAGE = 0, 1, 2, 3, 4
ORIGINS = ("target", "drafter", "lookup", "n-gram", "inner drafter")


@struct.dataclass
class Draft:
    """A tree whose nodes have tokens.

    Attributes:
      layout: the shape of the B rows' trees.
      tokens: [B, T] int32. Tokens of the nodes.
      q: [B, T, V] float32. The probabilities from which each inner node's children were
        drawn. None if the acceptance rule does not need them.
      origin: [B, T] uint8. The source of each node, an index into `ORIGINS`. If None,
        the drafter ("drafter") proposed all nodes.
      kind: [B, T] int32. The kind of each candidate, see `pool.KINDS`. None if the
        nodes were not chosen by value.
      has_padding: True if some of the T nodes may be padding, whose parent is
        `models.nodes.NO_NODE`.
    """

    layout: Layout
    tokens: jax.Array
    q: jax.Array | None = None
    origin: jax.Array | None = None
    kind: jax.Array | None = None
    has_padding: bool = struct.field(pytree_node=False, default=False)


def only_root(root: jax.Array) -> Draft:
    """Returns the trees of plain decoding, which contain only the roots [B]."""
    alone = jnp.full((root.shape[0], 1), -1, jnp.int32)
    return Draft(tree_layout(chain(0), alone), root[:, None])
