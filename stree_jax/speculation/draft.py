"""A tree of draft tokens (`Draft`), and the sources from which tokens come (`ORIGINS`).

Letters: B rows, T nodes, V tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.speculation.layout import Layout, tree_layout
from stree_jax.speculation.tree import chain

# The origin of a token of the output: the target, if it chose a token that was not
# drafted, or the source that drafted it. The constants are indices into ORIGINS.
TARGET, DRAFTER, LOOKUP, NGRAM, STAGE, FORCED, EARLIER = 0, 1, 2, 3, 4, 5, 6
ORIGINS = (
    *("target", "drafter", "lookup", "n-gram", "inner drafter", "constraint"),
    "earlier text",
)


@struct.dataclass
class Draft:
    """A tree of draft tokens for each row of a batch. Node 0 is the root, the last
    token of the row's text.

    Attributes:
      layout: parents, depths and children of the nodes.
      tokens: [B, T] int32. Tokens of the nodes.
      q: [B, T, V] float32. The probabilities from which each inner node's children were
        drawn. None if the acceptance rule does not need them.
      origin: [B, T] uint8. The source that proposed each node, an index into `ORIGINS`.
        If None, the drafter ("drafter") proposed all nodes.
      kind: [B, T] int32. With tree "auto", the kind of each node, for which an
        acceptance rate is estimated, such as "found by prompt lookup after a match of 3
        tokens"; see `adaptive.calibration`. None for other trees.
      has_padding: True if some of the T nodes may be padding, whose parent is
        `models.layers.nodes.NO_NODE`.
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
