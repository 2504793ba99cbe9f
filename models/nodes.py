"""The tables derived from a tree's `parents`, and the input of a mixer's pass.

`parents` [B, T] int32 lists each node's parent row, parents before children. -1 marks a
child of the committed context (one for a tree, several for a forest), and `NO_NODE`
padding: rows of a smaller tree in arrays made for a larger one.
"""

from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.cpu_kernels import cpu_kernel, ints
from stree_jax.models.mixer import MixerPending, Record

# How SSM layers go through nodes: "tree", any mask, all nodes at once; "chain", one
# chain in row order, by chunks once it is long. The others are baselines for chains:
# "chunk", by chunks whatever the length; "step", token by token.
Scan = Literal["tree", "chain", "chunk", "step"]

NO_NODE = -2  # as a parent


@struct.dataclass
class Nodes:
    """The topology of the T tokens of one pass.

    Attributes:
      mask: [B, T, T] bool, `mask[b, t, s]` iff s is t or an ancestor of t (L).
      depth: [B, T] int32, edges from the first uncommitted ancestor.
      window: [B, T, K] int32, rows of concat(conv window [K-1], nodes [T]) under the
        taps of a K-tap convolution ending in each node.
      count: [B] int32. Rows [:count] are nodes; the rest is padding, whose mask rows
        are empty (not even the diagonal) and whose outputs are unspecified, so that
        kernels may skip it. If None, there is no padding.
      scan: how SSM layers go through the nodes.
    """

    mask: jax.Array
    depth: jax.Array
    window: jax.Array
    count: jax.Array | None = None
    scan: Scan = struct.field(pytree_node=False, default="tree")

    def taps(self, conv_taps: int) -> jax.Array:
        """Returns `window` for a convolution with fewer taps than the longest."""
        fewer = self.window.shape[2] - conv_taps
        return self.window[:, :, fewer:] - fewer


@struct.dataclass
class Pass(Generic[Record]):
    """One pass over the nodes of a tree, as each mixer gets it.

    All mixers have one signature, `mixer(u, pass_, state, record)`. u [B, Tq, d] is the
    input at the queried nodes, `state` the mixer's committed state, and `record` its
    record of the nodes that earlier passes have added (None if this pass queries all
    nodes). They return the output [B, Tq, d] float32, the record of all T nodes, and
    the state after `pending`. The returned record may be that of `pending`, if it is of
    more nodes, with the first T rows written over. A channel mixer gets and returns
    None for record and state.

    Attributes:
      nodes: topology of all T nodes.
      rows: [Tq] int32, rows of the queried nodes; rows >= T are dropped. If None, all
        nodes are queried, and Tq = T.
      pending: the accepted path that the mixer has to replay first, or None.
      length: [B] int32, committed tokens, those of `pending` included.
      live: [B] int32. Queried nodes [:live] are wanted; outputs of the others are
        unspecified. If None, all are wanted.
    """

    nodes: Nodes
    rows: jax.Array | None
    pending: MixerPending[Record] | None
    length: jax.Array
    live: jax.Array | None = None

    def nodes_only(self, x: jax.Array) -> jax.Array:
        """Returns x [B, Tq, ...] with 0 in place of padding, before rows are mixed."""
        if self.live is None:
            return x
        place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        is_node = place < self.live[:, None]
        return jnp.where(is_node.reshape(*is_node.shape, *[1] * (x.ndim - 2)), x, 0)

    def of_queries(self, table: jax.Array) -> jax.Array:
        """Returns the queried nodes' rows [B, Tq, ...] of a table [B, T, ...]."""
        return table if self.rows is None else table[:, self.rows]

    def merged(self, record: Any, new: Any) -> Any:
        """Writes the queried nodes' arrays [B, Tq, ...] over those of all nodes."""
        if self.rows is None:
            return new

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, self.rows].set(new, mode="drop")

        return jax.tree.map(write, record, new)


def ancestors(parents: jax.Array, count: int) -> jax.Array:
    """Returns each node's `count` nearest ancestors, itself first, -1 past the root.

    Args:
      parents: [B, T] int32.

    Returns:
      [B, T, count] int32.
    """
    batch, T = parents.shape
    itself = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (batch, T))

    def up(node: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        parent = jnp.take_along_axis(parents, jnp.maximum(node, 0), axis=1)
        return jnp.where(node >= 0, parent, -1), node

    _, table = jax.lax.scan(up, itself, length=count)
    return jnp.moveaxis(table, 0, -1)


def tree_nodes(parents: jax.Array, conv_taps: int, *, partly: bool = False) -> Nodes:
    """Returns mask, depth and convolution windows of a tree or forest.

    Args:
      parents: [B, T] int32, see the module's docstring.
      conv_taps: K.
      partly: True if the last rows may be padding.
    """
    mask, depth, window = _tree_tables(parents, conv_taps=conv_taps)
    count = (parents != NO_NODE).sum(axis=1, dtype=jnp.int32) if partly else None
    return Nodes(mask, depth, window, count)


def _tables_shapes(
    parents: jax.Array, *, conv_taps: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    B, T = parents.shape
    mask = jax.ShapeDtypeStruct((B, T, T), jnp.bool_)
    return mask, ints(B, T), ints(B, T, conv_taps)


@cpu_kernel(
    "stree_tree_nodes",
    outputs=_tables_shapes,
    # The tables of the root alone are constants to XLA.
    unsupported=lambda parents, **_: parents.shape[1] == 1,
)
def _tree_tables(
    parents: jax.Array, *, conv_taps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns mask [B, T, T], depth [B, T] and window [B, T, K] of `tree_nodes`."""
    T, none = parents.shape[1], (parents == NO_NODE)[..., None]
    lineage = jnp.where(none, -1, ancestors(parents, T))  # [B, T, T]
    rows = jnp.arange(T, dtype=jnp.int32).reshape(1, 1, 1, T)
    mask = (lineage[..., None] == rows).any(axis=2)
    depth = jnp.maximum((lineage >= 0).sum(axis=-1, dtype=jnp.int32) - 1, 0)

    K1 = conv_taps - 1
    back = jnp.arange(conv_taps, dtype=jnp.int32).reshape(1, 1, -1)
    nearest = jnp.where(none, -1, ancestors(parents, conv_taps))
    # The k-th ancestor; past the root, the (k - depth)-th last committed token.
    window = jnp.where(nearest >= 0, K1 + nearest, K1 - (back - depth[..., None]))
    return mask, depth, window[..., ::-1]


def chain_nodes(
    batch: int,
    T: int,
    conv_taps: int,
    scan: Scan = "chain",
    length: jax.Array | None = None,
) -> Nodes:
    """Returns the tables of one chain in row order.

    Args:
      length: [B] int32, number of nodes; the other rows are padding. If None, all rows
        are nodes.
    """
    row = jnp.arange(T, dtype=jnp.int32)
    mask = row.reshape(1, T, 1) >= row.reshape(1, 1, T)
    taps = jnp.arange(conv_taps, dtype=jnp.int32)
    window = row.reshape(1, T, 1) + taps.reshape(1, 1, -1)
    if length is not None:
        mask = mask & (row[None] < length[:, None])[..., None]
    return Nodes(
        mask=jnp.broadcast_to(mask, (batch, T, T)),
        depth=jnp.broadcast_to(row[None], (batch, T)),
        window=jnp.broadcast_to(window, (batch, T, conv_taps)),
        count=length,
        scan=scan,
    )
