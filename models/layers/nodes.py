"""The topology of a tree (`Nodes`), and the arguments of a mixer's forward pass
(`Pass`).

`parents` [B, T] int32 has the row of each node's parent; parents precede their
children. -1 marks a child of the committed text (one in a tree, several in a forest).
`NO_NODE` marks padding: unused rows when a tree is smaller than its arrays.
"""

from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.cpu_kernels import cpu_kernel, ints
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.layers.mixer import MixerPending, Record

# How SSM layers scan the nodes.
# "tree": any mask, all nodes in one operation.
# "chain": one chain in row order; long chains (`CHUNK` of the mixer) run in chunks.
# "chunk" and "step" are baselines for chains: always in chunks, and token by token.
Scan = Literal["tree", "chain", "chunk", "step"]

NO_NODE = -2  # parent of a padding row


@struct.dataclass
class Nodes:
    """The topology of the T tokens of one forward pass.

    Attributes:
      mask: [B, T, T] bool. True if s is t or an ancestor of t (the matrix L of STree).
      depth: [B, T] int32, number of edges from the root of the node's tree.
      window: [B, T, K] int32, input rows of a K-tap convolution that ends at each node,
        as indices into concat(conv window [K-1], nodes [T]).
      valid_count: [B] int32. Rows [:valid_count] are nodes. The rest is padding, whose
        mask rows are empty (not even the diagonal) and whose outputs are unspecified,
        so that kernels may skip it. If None, there is no padding.
      scan: how SSM layers scan the nodes.
    """

    mask: jax.Array
    depth: jax.Array
    window: jax.Array
    valid_count: jax.Array | None = None
    scan: Scan = struct.field(pytree_node=False, default="tree")

    def taps(self, conv_taps: int) -> jax.Array:
        """Returns `window` [B, T, conv_taps] for a convolution with `conv_taps` <=
        K."""
        fewer = self.window.shape[2] - conv_taps
        return self.window[:, :, fewer:] - fewer


register_for_export(Nodes)  # its only static field, `scan`, is a text


@struct.dataclass
class Pass(Generic[Record]):
    """One forward pass over the nodes of a tree, as each mixer receives it.

    A tree may be computed in one pass, or level by level in several. The nodes that a
    pass computes are the queried nodes.

    Every mixer is called as `mixer(u, pass_, state, record)`. u [B, Tq, d] is the input
    of the queried nodes. `state` is the mixer's state after the committed tokens.
    `record` is the record of the nodes that earlier passes over the same tree have
    computed, None if this pass queries all nodes.

    The mixer returns its output [B, Tq, d] float32, the record of all T nodes, and the
    state after the path `pending`. If the record in `pending` has more than T rows, the
    returned record may be that one with its first T rows overwritten. For a channel
    mixer, the state is None, and in place of a record is a `mixer.Sent` or None.

    Attributes:
      nodes: topology of all T nodes.
      rows: [Tq] int32, indices of the queried nodes; indices >= T are dropped. If None,
        all nodes are queried, and Tq = T.
      pending: the pending path (see `mixer`), which the mixer replays first. If None,
        there is no path to replay.
      length: [B] int32, number of committed tokens, including those of `pending`.
      valid_count: [B] int32. Queried nodes [:valid_count] are valid; outputs of the
        rest are unspecified. If None, all are valid.
      source: what the layer's mixers read of other layers, see `Mixer.source`: another
        layer's state, which includes `pending`, and its record of all T nodes, as a
        pair, or None and the array that it sent; or the layer's per-layer input
        [B, Tq, P] float32. None for most layers.
      experts: for a mixture of experts, [B, Tq, n] int32 with n >= k: the experts that
        each queried node has to use; -1 where its router chooses. If None, routers
        choose all. (Of a layer: a dictionary of these arrays by the mixer's name.)
    """

    nodes: Nodes
    rows: jax.Array | None
    pending: MixerPending[Record] | None
    length: jax.Array
    valid_count: jax.Array | None = None
    source: Any = None
    experts: Any = None

    def nodes_only(self, x: jax.Array) -> jax.Array:
        """Returns x [B, Tq, ...] with padding set to 0.

        Needed before products across rows: padding is unspecified and may be NaN.
        """
        if self.valid_count is None:
            return x
        place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        is_node = place < self.valid_count[:, None]
        return jnp.where(is_node.reshape(*is_node.shape, *[1] * (x.ndim - 2)), x, 0)

    def of_queries(self, table: jax.Array) -> jax.Array:
        """Selects the queried nodes' rows [B, Tq, ...] of an array [B, T, ...]."""
        return table if self.rows is None else table[:, self.rows]

    def merged(self, record: Any, new: Any) -> Any:
        """Returns `record` [B, T, ...] with `new` [B, Tq, ...] at the queried nodes."""
        if self.rows is None:
            return new

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, self.rows].set(new, mode="drop")

        return jax.tree.map(write, record, new)


def ancestors(parents: jax.Array, count: int) -> jax.Array:
    """Returns each node and its nearest ancestors.

    Args:
      parents: [B, T] int32, see the module's docstring.
      count: length of each list.

    Returns:
      [B, T, count] int32: rows of the node itself, its parent, its grandparent and so
      on; negative past the root.
    """
    batch, T = parents.shape
    itself = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (batch, T))

    def up(node: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        parent = jnp.take_along_axis(parents, jnp.maximum(node, 0), axis=1)
        return jnp.where(node >= 0, parent, -1), node

    _, table = jax.lax.scan(up, itself, length=count)
    return jnp.moveaxis(table, 0, -1)


def tree_nodes(
    parents: jax.Array, conv_taps: int, *, has_padding: bool = False
) -> Nodes:
    """Derives the topology of a tree or forest from its parents.

    Args:
      parents: [B, T] int32, see the module's docstring.
      conv_taps: K, taps of the model's longest convolution.
      has_padding: True if the last rows may be padding (`NO_NODE`).
    """
    mask, depth, window = _tree_tables(parents, conv_taps=conv_taps)
    valid_count = None
    if has_padding:
        valid_count = (parents != NO_NODE).sum(axis=1, dtype=jnp.int32)
    return Nodes(mask, depth, window, valid_count)


def _tables_shapes(
    parents: jax.Array, *, conv_taps: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    B, T = parents.shape
    mask = jax.ShapeDtypeStruct((B, T, T), jnp.bool_)
    return mask, ints(B, T), ints(B, T, conv_taps)


@cpu_kernel(
    "stree_tree_nodes",
    outputs=_tables_shapes,
    # For a tree of only the root, the tables are constants that XLA folds.
    unsupported=lambda parents, **_: parents.shape[1] == 1,
)
def _tree_tables(
    parents: jax.Array, *, conv_taps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns mask [B, T, T], depth [B, T] and window [B, T, K]; see `Nodes`."""
    T, is_padding = parents.shape[1], (parents == NO_NODE)[..., None]
    lineage = jnp.where(is_padding, -1, ancestors(parents, T))  # [B, T, T]
    rows = jnp.arange(T, dtype=jnp.int32).reshape(1, 1, 1, T)
    mask = (lineage[..., None] == rows).any(axis=2)
    depth = jnp.maximum((lineage >= 0).sum(axis=-1, dtype=jnp.int32) - 1, 0)

    K1 = conv_taps - 1
    back = jnp.arange(conv_taps, dtype=jnp.int32).reshape(1, 1, -1)
    nearest = jnp.where(is_padding, -1, ancestors(parents, conv_taps))
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
    """Returns the topology of a chain: each row's parent is the row before it.

    Args:
      batch: B.
      T: number of rows.
      conv_taps: K, taps of the model's longest convolution.
      scan: see `Nodes.scan`.
      length: [B] int32. Rows [:length] are nodes; the rest is padding. If None, all
        rows are nodes.
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
        valid_count=length,
        scan=scan,
    )
