"""Shapes of draft trees: which draft token continues which, and the names of trees.

A `Tree` is an array `parents` [T]. Node 0 is the root, which holds the last token of
the text so far, and every other node has an earlier node as its parent. For a `Beam`,
the parents are chosen anew at every step. For `Auto`, the number of nodes is chosen,
too: each step uses a `Budget` of nodes.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.common.checks import as_integer, decimal, shown, with_hints
from stree_jax.cpu_kernels import at_most
from stree_jax.models import Nodes, tree_nodes
from stree_jax.speculation.pruned_widths import (
    child_counts,
    logistic,
    pruned_widths,
    widths_of_sum,
)

# Maximum children per node of a `Budget`; sampled acceptance loops over all of them.
MOST_CHILDREN = 8
DEEPEST = 15  # maximum depth of a `Budget`; every step replays a path of this length
# Masks grow with the square of the nodes, and no measured tree with more than 64 nodes
# was faster than a smaller one.
MAX_NODES = 1024
MOST_SHARED = 1024  # nodes of a batch, up to which small trees are padded
# Maximum number of nodes of a compiled step that smaller trees share. In a shared step
# the smaller trees are padded, and the kernels do not skip all of the work on padding.
MAX_SHARED_NODES = 16


@struct.dataclass
class Tree:
    """A tree that is the same at every step. Trees with equal sizes below share
    compiled programs.

    Attributes:
      parents: [T] int32. Parent of each node; -1 for the root, node 0.
      depth: M, the number of edges on the longest path.
      width: maximum number of nodes at one depth.
      inner: maximum number of nodes with children at one depth, including the root.
      children: maximum number of children of one node.

    Example:
      >>> stree_jax.trees.NAMED_TREES["E"].size
      16
    """

    parents: jax.Array | np.ndarray
    depth: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)
    inner: int = struct.field(pytree_node=False)
    children: int = struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        """T, the number of nodes, including the root."""
        return self.parents.shape[0]

    def rows(self, batch: int) -> jax.Array:
        """Returns `parents` [B, T] for a batch of rows."""
        return jnp.broadcast_to(jnp.asarray(self.parents)[None], (batch, self.size))

    def nodes(self, batch: int, conv_taps: int) -> Nodes:
        """Returns mask, depths and convolution windows for a batch of rows."""
        return tree_nodes(self.rows(batch), conv_taps)

    def __repr__(self) -> str:
        parents: Any = self.parents
        if isinstance(parents, np.ndarray | jax.Array):
            traced = isinstance(parents, jax.core.Tracer)
            parents = parents if traced else parents.tolist()
        return (
            f"Tree(parents={parents}, depth={self.depth}, width={self.width}, "
            f"inner={self.inner}, children={self.children})"
        )


@struct.dataclass
class Beam:
    """A tree that contains all tokens of a beam search: `depth` layers of `width`
    nodes.

    Which nodes of a layer have children, and how many, is decided while drafting.

    Example:
      >>> stree_jax.trees.Beam(width=4, depth=3).size
      13
    """

    width: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        sizes = _integers("beam", width=self.width, depth=self.depth)
        if min(sizes) < 1:
            raise ValueError(
                f"beam: want width and depth >= 1, got {self.width} and {self.depth}"
            )
        for name, size in zip(("width", "depth"), sizes, strict=True):
            object.__setattr__(self, name, size)
        _check_size("beam", self.size)

    @property
    def size(self) -> int:
        """T, the number of nodes, including the root."""
        return 1 + self.width * self.depth

    @property
    def children(self) -> int:
        """Maximum number of children of one node."""
        return self.width


@struct.dataclass
class Budget:
    """A tree of `size` nodes, which are chosen at every step: the candidates that the
    target is most likely to accept.

    Attributes:
      size: T, the number of nodes, including the root.
      depth: maximum number of edges on a path.
      shared_size: number of nodes of a compiled step that this tree shares with larger
        trees. If 0, it has a step of its own.
      has_padding: True if the tree of a step may have fewer than `size` nodes. The rest
        is padding, whose parent is `models.layers.nodes.NO_NODE`.
    """

    size: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)
    shared_size: int = struct.field(pytree_node=False, default=0)
    has_padding: bool = struct.field(pytree_node=False, default=False)

    @property
    def children(self) -> int:
        """Maximum number of children of one node."""
        return min(self.size - 1, MOST_CHILDREN)


@struct.dataclass
class Auto:
    """Adaptive trees: the nodes and their number are chosen at every step.

    Attributes:
      sizes: numbers of nodes that a tree may have, growing from 1 (plain decoding).

    Example:
      >>> stree_jax.trees.Auto(sizes=(1, 4, 8)).sizes
      (1, 4, 8)
    """

    sizes: tuple[int, ...] = struct.field(pytree_node=False, default=(1, 4, 8, 16))

    def __post_init__(self) -> None:
        listed = isinstance(self.sizes, list | tuple)
        found = [as_integer(n) for n in self.sizes] if listed else [None]
        sizes = tuple(n for n in found if n is not None)
        if len(sizes) < len(found):
            got = shown(self.sizes)
            raise ValueError(f"auto: sizes: want integers, as (1, 4, 8), got {got}")
        object.__setattr__(self, "sizes", sizes)  # a tuple, because it must be hashable
        growing = all(a < b for a, b in pairwise(self.sizes))
        if self.sizes[:1] != (1,) or len(self.sizes) < 2 or not growing:
            listing = ",".join(map(str, sizes))
            raise ValueError(
                f"auto: want growing sizes from 1 on, as 1,4,8; got {listing}"
            )
        _check_size("auto", self.size)

    @property
    def menu(self) -> tuple[Budget, ...]:
        """The trees, plain decoding first."""
        return tuple(_budget(n) for n in self.sizes)

    @property
    def shared_menu(self) -> tuple[Budget, ...]:
        """`menu`, in which small trees may share the compiled step of a larger one."""
        sizes = (n for n in self.sizes if n <= MAX_SHARED_NODES or n == self.sizes[1])
        shared = max(sizes)
        return tuple(
            replace(tree, shared_size=shared) if 1 < tree.size <= shared else tree
            for tree in self.menu
        )

    @property
    def size(self) -> int:
        """Maximum number of nodes."""
        return self.sizes[-1]

    @property
    def depth(self) -> int:
        """Maximum number of edges on a path."""
        return self.menu[-1].depth

    @property
    def children(self) -> int:
        """Maximum number of children of one node."""
        return self.menu[-1].children


Topology = Tree | Beam | Budget | Auto


def _budget(size: int, *, has_padding: bool = False) -> Budget:
    """Returns the `Budget` of `size` nodes, as deep as allowed."""
    return Budget(size, min(size - 1, DEEPEST), has_padding=has_padding)


def compiled_steps(
    menu: Sequence[Topology], rows: int
) -> list[tuple[Topology, tuple[int, ...]]]:
    """Returns the steps to compile for the trees that a policy may choose (its menu).

    Small trees share one step, in which they are padded to its size, if the whole
    batch has at most `MOST_SHARED` nodes.

    Args:
      menu: the trees that a policy may choose.
      rows: B, the number of rows in the batch.

    Returns:
      For each step, the tree that it is compiled for, and the indices in the menu of
      the trees that use it.
    """
    steps: list[tuple[Topology, tuple[int, ...]]] = []
    for shared in dict.fromkeys(_shared_size(tree, rows) for tree in menu):
        places = [
            k for k, tree in enumerate(menu) if _shared_size(tree, rows) == shared
        ]
        if shared and len(places) > 1:
            steps.append((_budget(shared, has_padding=True), tuple(places)))
        else:
            steps += [(menu[k], (k,)) for k in places]
    return steps


def _shared_size(tree: Topology, rows: int) -> int:
    """Returns the number of nodes of the shared step that a tree uses in a batch of
    `rows`; 0 if its step is not shared."""
    size = tree.shared_size if isinstance(tree, Budget) else 0
    return size if at_most(rows * size, MOST_SHARED) else 0


def _integers(what: str, **values: object) -> list[int]:
    """Returns the values as ints; raises ValueError with the name of the first value
    that is not an integer."""
    found = []
    for name, value in values.items():
        number = as_integer(value)
        if number is None:
            raise ValueError(f"{what}: {name}: want an integer, got {shown(value)}")
        found.append(number)
    return found


def _check_size(what: str, nodes: int) -> None:
    """Raises ValueError if a tree is too large. Call it before the tree is built, which
    may not fit in memory."""
    if nodes > MAX_NODES:
        raise ValueError(f"{what}: {nodes} nodes; want at most {MAX_NODES}")


@with_hints
def make_tree(parents: Sequence[int] | np.ndarray) -> Tree:
    """Makes a tree from the parents of its nodes.

    Args:
      parents: [T] ints. `parents[0]` is -1, `parents[t]` is in [0, t).

    Raises:
      ValueError: the parents are invalid; the message names the first wrong node.

    Example:
      >>> tree = stree_jax.trees.make_tree([-1, 0, 0, 1])  # parents; -1 is the root's
      >>> tree.size, tree.depth
      (4, 2)
    """
    try:
        table = np.asarray(parents)
    except (TypeError, ValueError):  # rows of different lengths, or values inside jit
        raise ValueError("parents: want a list of integers [T]") from None
    if table.ndim != 1 or table.size == 0:
        raise ValueError(f"parents: want shape [T] with T >= 1, got {table.shape}")
    if not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"parents: want integers, got {table.dtype}")
    _check_size("parents", table.size)
    if table[0] != -1:
        raise ValueError(f"parents[0]: the root's parent is -1, got {table[0]}")
    for t, p in enumerate(table[1:].tolist(), start=1):
        if p == -1:
            raise ValueError(f"parents[{t}]: a second root; only node 0 has parent -1")
        if p == t:
            raise ValueError(f"parents[{t}]: node {t} is its own parent (a cycle)")
        if not 0 <= p < len(table):
            raise ValueError(f"parents[{t}]: no node {p} in a tree of {len(table)}")
        if p > t:
            raise ValueError(
                f"parents[{t}]: parent {p} comes after its child; "
                "order nodes parents first (cycles are not allowed)"
            )
    depth = np.zeros(len(table), int)
    for t in range(1, len(table)):
        depth[t] = depth[table[t]] + 1
    children = np.bincount(table[1:], minlength=len(table))
    return Tree(
        parents=table.astype(np.int32),  # NumPy: importing must not initialize a device
        depth=int(depth.max()),
        width=int(np.bincount(depth)[1:].max(initial=1)),
        inner=int(np.bincount(depth[children > 0]).max(initial=1)),
        children=int(children.max()),
    )


@with_hints
def chain(n: int) -> Tree:
    """Makes a chain of n draft tokens: n + 1 nodes (standard speculative decoding).

    Example:
      >>> stree_jax.trees.chain(4).size  # four draft tokens below the root
      5
    """
    (n,) = _integers("chain", n=n)
    if n < 0:
        raise ValueError(f"chain: want n >= 0 drafted tokens, got {n}")
    _check_size("chain", n + 1)
    return make_tree(np.arange(-1, n))


@with_hints
def full_tree(branching: int, depth: int) -> Tree:
    """Makes a full tree: every node above `depth` has `branching` children.

    Example:
      >>> stree_jax.trees.full_tree(branching=2, depth=3).size
      15
    """
    branching, depth = _integers("full_tree", branching=branching, depth=depth)
    if branching < 1 or depth < 0:
        raise ValueError(
            f"full_tree: want branching >= 1 and depth >= 0, got {branching}, {depth}"
        )
    _check_size("full_tree", 1 + depth)  # limits the loop below
    return _branching("full_tree", repeat(branching, depth))


def cartesian(*branching: int) -> Tree:
    """Makes a tree in which every node at depth d has `branching[d]` children: all
    combinations of `branching[d]` guesses per position (Medusa, section 2.1).

    Example:
      >>> stree_jax.trees.cartesian(4, 2).size  # 1 + 4 + 4 * 2
      13
    """
    for i, count in enumerate(branching):
        _integers("cartesian", **{f"branching[{i}]": count})
    if not branching or min(branching) < 1:
        raise ValueError(f"cartesian: want guesses >= 1 per level, got {branching}")
    return _branching("cartesian", branching)


def _branching(what: str, counts: Iterable[int]) -> Tree:
    """Returns the tree whose nodes have `counts[d]` children at depth d."""
    parents, level = [-1], [0]
    for count in counts:
        start = len(parents)
        _check_size(what, start + count * len(level))
        parents += [node for node in level for _ in range(count)]
        level = list(range(start, len(parents)))
    return make_tree(parents)


def from_child_counts(levels: Sequence[Sequence[int]]) -> Tree:
    """Makes a tree from the number of children of each node, level by level.

    `[[3], [2, 1, 0]]` is a root with three children, which have 2, 1 and 0 children.
    """
    parents, level = [-1], [0]
    for counts in levels:
        if len(counts) != len(level):
            raise ValueError(
                f"child counts: {len(counts)} for a level of {len(level)} nodes"
            )
        start = len(parents)
        parents += [
            node for node, n in zip(level, counts, strict=True) for _ in range(n)
        ]
        level = list(range(start, len(parents)))
    return make_tree(parents)


@with_hints
def layered(width: int, depth: int) -> Tree:
    """Makes a tree of `depth` layers of `width` nodes below the root, with more
    children for better ranks.

    The root has `width` children. In each layer the first node (the drafter's best
    guess) is the parent of all but one of the next layer's nodes, and the second node
    is the parent of the last one.

    Example:
      >>> stree_jax.trees.layered(width=3, depth=2).size
      7
    """
    width, depth = _integers("layered", width=width, depth=depth)
    if width < 1 or depth < 1:
        raise ValueError(f"layered: want width and depth >= 1, got {width} and {depth}")
    _check_size("layered", 1 + width * depth)
    inner = [width] if width == 1 else [width - 1, 1] + [0] * (width - 2)
    return from_child_counts([[width]] + [inner] * (depth - 1))


@with_hints
def pruned(
    children: int, levels: int, nodes: int | None = None, leaves: int | None = None
) -> Tree:
    """Makes a full tree pruned level by level, after SpecMemo (Yildirim and Chen 2025).

    Level d of the full tree has k**d nodes. The kept share is a logistic function of d,
    scaled to 1 at the first level, and at least k nodes of each level are kept. The
    rightmost nodes are removed first, with their descendants. The paper gives no
    constants: here the share is 1 / (1 + exp(2 (d - middle of the levels))) before
    scaling.

    Args:
      children: k, the number of children of each node of the full tree.
      levels: l, the number of levels below the root.
      nodes: number of nodes, including the root, at least 1 + k l. The scale is then
        chosen to give that number, with shares up to 1. If None, the scale above
        decides.
      leaves: number of leaves (nodes without children). If None, it is the largest
        number that the widths of the levels allow: nodes are filled from the left with
        `children` children each, so that the nodes to the right have none.

    Raises:
      ValueError: `children` or `levels` is less than 1, or no such tree has that number
        of nodes or leaves.

    Example:
      >>> stree_jax.trees.pruned(children=4, levels=4, nodes=32).size
      32
    """
    children, levels = _integers("pruned", children=children, levels=levels)
    if nodes is not None:
        (nodes,) = _integers("pruned", nodes=nodes)
    if leaves is not None:
        (leaves,) = _integers("pruned", leaves=leaves)
    if children < 1 or levels < 1:
        raise ValueError(f"pruned: want k and l >= 1, got {children} and {levels}")
    _check_size("pruned", max(1 + children * levels, nodes or 1))
    if nodes is None:
        widths = pruned_widths(children, levels, 1 / logistic(1, levels))
    else:
        widths = widths_of_sum(children, levels, nodes - 1, MAX_NODES)
    _check_size("pruned", 1 + sum(widths))
    return from_child_counts(child_counts([1, *widths], children, leaves))


# The static trees of STree's Table 3. The paper gives only three numbers for each,
# noted here as "width/depth/nodes": the maximum number of nodes at one depth, the
# depth, and the number of nodes with the root. The edges are ours: siblings are in
# order of rank, and better ranks have more children.
NAMED_TREES = {
    "A": layered(3, 4),  # 3/4/13
    "B": from_child_counts(  # 16/3/29
        [[6], [5, 4, 3, 2, 1, 1], [3, 1, 1, 1] + [0] * 12]
    ),
    "C": from_child_counts([[6], [3, 2, 1, 0, 0, 0], [2, 1, 0, 0, 0, 0]]),  # 6/3/16
    "D": from_child_counts([[4], [2, 1, 0, 0], [2, 1, 0], [1, 1, 0]]),  # 4/4/13
    "E": layered(3, 5),  # 3/5/16
}


def resolve_tree(tree: "Topology | str | Sequence[int]") -> Topology:
    """Returns the tree for a name, a list of parents, or a tree.

    Names are the keys of `NAMED_TREES` and

    - "chain:N": N draft tokens in a row,
    - "binary:L": a full binary tree with L levels, including the root's,
    - "cartesian:4x2x2": numbers of children per node, level by level,
    - "pruned:KxL", "pruned:KxLxN" and "pruned:KxLxNxS": `pruned(K, L, N, S)`,
    - "beam:WxD": `Beam(W, D)`,
    - "parents:0,0,1": the list of parents [-1, 0, 0, 1],
    - "auto" and "auto:1,4,8": `Auto()` and `Auto((1, 4, 8))`.

    Raises:
      ValueError: the name is unknown or the tree is invalid.

    Example:
      >>> stree_jax.trees.resolve_tree("chain:4").parents
      array([-1,  0,  1,  2,  3], dtype=int32)
    """
    if isinstance(tree, Topology):
        return tree
    try:
        return _named(tree) if isinstance(tree, str) else _of_parents(tree)
    except ValueError as error:
        raise ValueError(f"tree: {error}") from None


def _of_parents(tree: Any) -> Tree:
    """Calls `make_tree` if the value may be a list of parents, else raises
    ValueError."""
    listed = isinstance(tree, Sequence | np.ndarray | jax.Array)
    if not listed or isinstance(tree, bytes) or not getattr(tree, "ndim", 1):
        raise ValueError(f"want a tree, a name or a list of parents, got {shown(tree)}")
    return make_tree(tree)


def _named(tree: str) -> Topology:
    """Returns the tree for a name, see `resolve_tree`."""
    if tree in NAMED_TREES:
        return NAMED_TREES[tree]
    if tree == "auto":
        return Auto()
    kind, _, size = tree.partition(":")
    separator = "," if kind in ("parents", "auto") else "x"
    found = [decimal(n) for n in size.split(separator)]
    numbers = [n for n in found if n is not None]
    if len(numbers) == len(found):
        match kind, numbers:
            case "chain", [n]:
                return chain(n)
            case "binary", [levels] if levels > 0:
                return full_tree(2, levels - 1)
            case "cartesian", _:
                return cartesian(*numbers)
            case "pruned", [k, levels, *rest] if len(rest) <= 2:
                return pruned(k, levels, *rest)
            case "beam", [width, depth]:
                return Beam(width, depth)
            case "parents", _:
                return make_tree([-1, *numbers])
            case "auto", _:
                return Auto(tuple(numbers))
    raise ValueError(f"unknown name {shown(tree)}; {_known_names(tree)}")


def _known_names(tree: str) -> str:
    """Returns a hint for an unknown name: the known names and the closest one."""
    forms = ["chain:N", "binary:L", "beam:WxD"]
    forms += ["cartesian:4x2x2", "pruned:4x4x32", "parents:0,0,1"]
    plain = [*NAMED_TREES, "auto"]
    for name in plain:
        if tree.strip().casefold() == name.casefold():
            return f"did you mean {name!r}?"
    known = f"known: {', '.join([*plain, *forms])}"
    kinds = {form.partition(":")[0]: form for form in forms}
    close = difflib.get_close_matches(tree.partition(":")[0].casefold(), kinds, 1)
    return f"{known}; did you mean {kinds[close[0]]}?" if close else known
