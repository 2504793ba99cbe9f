"""Test the tables of a tree against following its parents in Python."""

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stree_jax.models import chain_nodes, tree_nodes
from stree_jax.models.layers.nodes import ancestors
from tests.support.reference import (
    chain,
    depth_of,
    mask_of,
    path_to,
    random_parents,
    window_of,
)

BATCH, T = 3, 8
jit_tree_nodes = jax.jit(tree_nodes, static_argnames="conv_taps")
jit_ancestors = jax.jit(ancestors, static_argnames="count")
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("taps", [1, 2, 4, 12])
@given(seed=seeds)
def test_tree_nodes(taps, seed):
    parents = random_parents(np.random.default_rng(seed), BATCH, T)
    nodes = jit_tree_nodes(parents, conv_taps=taps)
    assert nodes.scan == "tree"
    assert nodes.mask.dtype == bool and nodes.depth.dtype == np.int32
    assert nodes.window.dtype == np.int32
    for b in range(BATCH):
        np.testing.assert_array_equal(nodes.mask[b], mask_of(parents[b]))
        np.testing.assert_array_equal(nodes.depth[b], depth_of(parents[b]))
        np.testing.assert_array_equal(nodes.window[b], window_of(parents[b], taps))


@pytest.mark.parametrize("count", [1, 3, T + 2])
@given(seed=seeds)
def test_ancestors(count, seed):
    parents = random_parents(np.random.default_rng(seed), BATCH, T)
    table = jit_ancestors(parents, count=count)
    assert table.shape == (BATCH, T, count)
    for b in range(BATCH):
        for t in range(T):
            nearest = path_to(parents[b], t)[::-1] + [-1] * count
            np.testing.assert_array_equal(table[b, t], nearest[:count])


@pytest.mark.parametrize("length, taps", [(1, 4), (6, 1), (6, 4), (3, 7)])
def test_chain_nodes(length, taps):
    parents = np.broadcast_to(chain(length), (2, length)).astype(np.int32)
    from_tree = tree_nodes(jax.numpy.asarray(parents), taps)
    nodes = chain_nodes(2, length, taps)
    assert nodes.scan == "chain"
    chex.assert_trees_all_equal(nodes.replace(scan="tree"), from_tree)
    chex.assert_trees_all_equal_dtypes(nodes.replace(scan="tree"), from_tree)
