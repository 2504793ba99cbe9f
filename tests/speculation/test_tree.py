"""Test trees: named sizes, derived layouts, and errors that name the fault."""

from itertools import pairwise, product

import numpy as np
import pytest

from stree_jax.speculation.layout import tree_layout, tree_levels
from stree_jax.speculation.tree import (
    MAX_NODES,
    NAMED_TREES,
    chain,
    from_child_counts,
    full_tree,
    layered,
    make_tree,
    pruned,
    resolve_tree,
)
from tests.support.reference import depth_of, path_to

PAPER_TABLE_3 = {  # max width, depth, tokens
    "A": (3, 4, 13),
    "B": (16, 3, 29),
    "C": (6, 3, 16),
    "D": (4, 4, 13),
    "E": (3, 5, 16),
}


@pytest.mark.parametrize("name", PAPER_TABLE_3)
def test_named_trees_have_the_sizes_of_the_paper(name):
    tree = NAMED_TREES[name]
    assert (tree.width, tree.depth, tree.size) == PAPER_TABLE_3[name]


def test_constructors():
    assert np.asarray(chain(3).parents).tolist() == [-1, 0, 1, 2]
    assert np.asarray(chain(0).parents).tolist() == [-1]
    binary = full_tree(2, 2)
    assert np.asarray(binary.parents).tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert (binary.depth, binary.width, binary.children) == (2, 4, 2)
    assert full_tree(2, 3).size == 15
    assert np.asarray(layered(2, 2).parents).tolist() == [-1, 0, 0, 1, 2]
    assert np.asarray(layered(1, 3).parents).tolist() == [-1, 0, 1, 2]


def test_layouts_match_a_walk_of_the_tree():
    rng = np.random.default_rng(0)
    for T in (1, 2, 9, 14):
        parents = [-1] + [int(rng.integers(0, t)) for t in range(1, T)]
        tree = make_tree(parents)
        layout, levels = tree_layout(tree, tree.rows(2)), tree_levels(tree)
        depth = depth_of(parents)
        assert np.asarray(layout.depth).tolist() == [depth.tolist()] * 2
        assert tree.depth == depth.max()
        assert levels.inner.shape == (tree.depth, tree.inner)
        for level, rows in enumerate(np.asarray(levels.inner)):
            at_level = np.flatnonzero(depth == level).tolist()
            expected = [t for t in at_level if t in parents]
            assert rows[: len(expected)].tolist() == expected
            assert (rows[len(expected) :] == T).all()
        for t in range(T):
            path = path_to(parents, t)
            padded = path + [0] * (tree.depth + 1 - len(path))
            assert np.asarray(layout.paths)[:, t].tolist() == [padded] * 2
            siblings = [s for s in range(1, T) if parents[s] == parents[t]]
            if t:
                rank = siblings.index(t)
                assert int(levels.rank[t]) == rank
                children = np.asarray(layout.children)[:, parents[t], rank]
                assert children.tolist() == [t] * 2


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "shape"),
        ([[-1, 0]], "shape"),
        ([-1.0, 0.0], "integers"),
        ([0, 0], r"parents\[0\]: the root's parent is -1"),
        ([-1, 0, -1], r"parents\[2\]: a second root"),
        ([-1, 1], r"parents\[1\]: node 1 is its own parent"),
        ([-1, 2, 0], r"parents\[1\]: parent 2 comes after its child"),
        ([-1, 0, 7], r"parents\[2\]: no node 7 in a tree of 3"),
        ([-1, 0, -2], r"parents\[2\]: no node -2"),
    ],
)
def test_errors_name_the_node(parents, message):
    with pytest.raises(ValueError, match=message):
        make_tree(parents)


def test_unknown_names_and_bad_sizes():
    assert resolve_tree("chain:4").size == 5
    assert resolve_tree([-1, 0, 0]).width == 2
    assert resolve_tree(NAMED_TREES["A"]) is NAMED_TREES["A"]
    assert resolve_tree("parents:0,0,1").parents.tolist() == [-1, 0, 0, 1]
    for name in ("F", "parents:", "parents:0,-1", "parents:0x0"):
        with pytest.raises(ValueError, match=f"unknown name '{name}'; known: A, B"):
            resolve_tree(name)
    with pytest.raises(ValueError, match=r"parents\[2\]: node 2 is its own parent"):
        resolve_tree("parents:0,2")
    with pytest.raises(ValueError, match="chain"):
        chain(-1)
    with pytest.raises(ValueError, match="full_tree"):
        full_tree(0, 2)
    with pytest.raises(ValueError, match="layered"):
        layered(2, 0)
    with pytest.raises(ValueError, match="child counts"):
        from_child_counts([[2], [1]])


def rank_paths(tree):
    """Returns, for each level below the root, the sibling ranks along each node's
    path."""
    parents = np.asarray(tree.parents).tolist()
    paths, used = [()], [0] * tree.size
    for parent in parents[1:]:
        paths.append((*paths[parent], used[parent]))
        used[parent] += 1
    return [[p for p in paths if len(p) == d] for d in range(1, tree.depth + 1)]


@pytest.mark.parametrize(
    ("k", "levels"), [*product(range(1, 6), range(1, 6)), (2, 8), (10, 3)]
)
def test_pruned_trees_keep_the_leftmost_nodes_of_levels(k, levels):
    """All nodes of the first level, then ever smaller shares: the leftmost nodes of the
    full tree. Any size that a tree with k or more nodes per level can have is possible.
    """
    full = sum(k**d for d in range(levels + 1))
    most = min(full, MAX_NODES)
    sizes = {int(n) for n in np.linspace(1 + k * levels, most, 12)}
    for size in [None, *sizes]:
        tree = pruned(k, levels, size)
        assert size in (None, tree.size) and tree.depth == levels
        by_level = rank_paths(tree)
        widths = [len(paths) for paths in by_level]
        assert widths[0] == k and min(widths) >= k
        shares = [n / k**d for d, n in enumerate(widths, start=1)]
        assert all(a >= b for a, b in pairwise(shares))
        for above, paths in pairwise([[()], *by_level]):
            lefts = ((*p, rank) for p, rank in product(above, range(k)))
            assert [p for p, _ in zip(lefts, paths, strict=False)] == paths


def test_shares_of_pruned_levels_follow_a_logistic():
    shares = [len(paths) / 4**d for d, paths in enumerate(rank_paths(pruned(4, 4)), 1)]
    share = [1 / (1 + np.exp(2 * (d - 2.5))) for d in (1, 2, 3, 4)]
    assert np.allclose(shares, np.array(share) / share[0], atol=0.02)
    assert shares[1] > 0.7 and shares[3] < 0.1
    assert resolve_tree("pruned:4x4").size == pruned(4, 4).size
    assert resolve_tree("pruned:5x4x32").size == 32


@pytest.mark.parametrize("leaves", [42, 50, 57])
def test_pruned_trees_have_the_given_number_of_leaves(leaves):
    tree = resolve_tree(f"pruned:10x4x64x{leaves}")
    children = np.bincount(np.asarray(tree.parents)[1:], minlength=tree.size)
    assert (tree.size, tree.depth) == (64, 4) and (children == 0).sum() == leaves
    assert [len(p) for p in rank_paths(tree)] == [
        len(p) for p in rank_paths(pruned(10, 4, 64))
    ]
    assert tree.children == 10


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("pruned:4x3x12", "trees of 13..85 nodes, the root included, got 12"),
        ("pruned:4x3x86", "trees of 13..85 nodes"),
        ("pruned:10x3x44x22", "levels of 10, 10, 23 nodes have 23..39 leaves, got 22"),
        ("pruned:10x3x44x40", "23..39 leaves"),
        ("pruned:0x3", "want k and l >= 1"),
        ("pruned:3x0", "want k and l >= 1"),
        ("pruned:2x600", "1201 nodes; want at most 1024"),
        ("pruned:2x60", "want at most 1024"),
        ("pruned:3", "unknown name"),
        ("pruned:3x3x16x8x2", "unknown name"),
    ],
)
def test_impossible_pruned_trees_are_refused(name, error):
    with pytest.raises(ValueError, match=error):
        resolve_tree(name)
