"""Index tables of trees, derived from their `parents`.

Letters: B rows, T nodes, M depth of the tree, I maximum number of inner nodes (nodes
with children) per level, C maximum number of children.
"""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.cpu_kernels import cpu_kernel, ints
from stree_jax.models import Nodes, tree_nodes
from stree_jax.models.layers.nodes import ancestors
from stree_jax.speculation.tree import Topology, Tree


@struct.dataclass
class Layout:
    """Paths and children of the trees of a batch; each row may have a different tree.

    Attributes:
      parents: [B, T] int32. Parent of each node; -1 for the root.
      depth: [B, T] int32. Number of edges from the root to each node.
      paths: [B, T, M + 1] int32. Nodes from the root to each node, padded with 0.
      children: [B, T, C] int32. Children of each node by rank, padded with T; C >= 1.
    """

    parents: jax.Array
    depth: jax.Array
    paths: jax.Array
    children: jax.Array


@struct.dataclass
class Levels:
    """The levels of a static tree, which is filled level by level.

    Attributes:
      inner: [M, I] int32. The inner nodes at depths 0..M - 1, padded with T.
      rank: [T] int32. Index of each node among its siblings.
    """

    inner: jax.Array
    rank: jax.Array


def _count_before(same: jax.Array) -> jax.Array:
    """Counts, for each node t, the earlier nodes s with same[..., t, s]: int32 [...,
    T]."""
    node = jnp.arange(same.shape[-1], dtype=jnp.int32)
    return (same & (node[:, None] > node[None])).sum(axis=-1, dtype=jnp.int32)


def tree_layout(tree: Topology, parents: jax.Array) -> Layout:
    """Computes depths, paths and children of trees from the parents of their nodes.

    Args:
      tree: the shape of the trees; its depth and maximum number of children set the
        sizes of the arrays.
      parents: [B, T] int32. Parent of each node, see `models.layers.nodes`.
    """
    tables = _layout_tables(parents, M=tree.depth, C=max(tree.children, 1))
    return Layout(parents, *tables)


def _tables_shapes(
    parents: jax.Array, *, M: int, C: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    B, T = parents.shape
    return ints(B, T), ints(B, T, M + 1), ints(B, T, C)


@cpu_kernel(
    "stree_tree_layout",
    outputs=_tables_shapes,
    # For a root alone XLA folds the tables into constants.
    unsupported=lambda parents, **_: parents.shape[1] == 1,
)
def _layout_tables(
    parents: jax.Array, *, M: int, C: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns depth [B, T], paths [B, T, M + 1] and children [B, T, C]."""
    T = parents.shape[1]
    node = jnp.arange(T, dtype=jnp.int32)

    def of_one(parents: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        lineage = ancestors(parents[None], M + 1)[0]
        depth = (lineage >= 0).sum(axis=-1, dtype=jnp.int32) - 1
        back = depth[:, None] - jnp.arange(M + 1, dtype=jnp.int32)[None]
        paths = jnp.take_along_axis(lineage, jnp.maximum(back, 0), axis=1)
        paths = jnp.where(back >= 0, paths, 0)
        rank = _count_before(parents[:, None] == parents[None])
        place = jnp.where(parents < 0, T, parents), rank
        children = jnp.full((T, C), T, jnp.int32)
        return depth, paths, children.at[place].set(node, mode="drop")

    return jax.vmap(of_one)(parents)


def tree_levels(tree: Tree) -> Levels:
    """Returns the levels of a static tree."""
    T, parents = tree.size, jnp.asarray(tree.parents, jnp.int32)
    node = jnp.arange(T, dtype=jnp.int32)
    depth = (ancestors(parents[None], tree.depth + 1)[0] >= 0).sum(-1, jnp.int32) - 1
    is_inner = (parents[None] == node[:, None]).any(axis=1)
    slot = _count_before((depth[:, None] == depth[None]) & is_inner[None])
    place = depth, jnp.where(is_inner, slot, tree.inner)
    inner = jnp.full((tree.depth, tree.inner), T, jnp.int32)
    inner = inner.at[place].set(node, mode="drop")
    return Levels(inner, _count_before(parents[:, None] == parents[None]))


def below_root(parents: jax.Array, conv_taps: int) -> Nodes:
    """Returns the nodes of trees without their roots, for a model whose state already
    contains the root.

    Node 0 remains as an isolated node, so that the indices of other nodes stay the
    same.

    Args:
      parents: [B, T] int32, -1 for the root.
      conv_taps: K, the number of taps of the model's convolutions.
    """
    return tree_nodes(jnp.where(parents == 0, -1, parents), conv_taps)
