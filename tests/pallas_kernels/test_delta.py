"""Test the gated delta rule against the recurrence along every path in float64.

Some tests also compute a plausible mistake and check that they would find it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stree_jax.pallas_kernels import delta, delta_chunks, delta_steps
from tests.support.deltas import (
    TOLERANCE,
    Shape,
    delta_inputs,
    delta_order,
    delta_path,
    delta_tree,
    equal_keys,
    past_of,
    queries,
    replayed_inputs,
)
from tests.support.reference import (
    assert_near,
    binary,
    chain,
    path_to,
    random_order,
    random_parents,
    random_tree,
    star,
)
from tests.support.scans import masks_of, normal, random_paths

SHAPES = {
    "one token": Shape(2, 1, 2, 1, 3, 4),
    "one head": Shape(1, 8, 1, 1, 4, 5),
    "heads share keys": Shape(2, 9, 6, 2, 3, 5),
    "a key head each": Shape(3, 5, 3, 3, 2, 3),
    "by column": Shape(2, 9, 4, 2, 3, 5, True),
}
SHAPE, BY_COLUMN = SHAPES["heads share keys"], SHAPES["by column"]
all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
both_decays = pytest.mark.parametrize(
    "shape", [SHAPE, BY_COLUMN], ids=["by head", "by column"]
)
seeds = st.integers(0, 2**32 - 1)

jit_scan = jax.jit(delta.delta_scan)
jit_replay = jax.jit(delta.delta_replay)
jit_replay_scan = jax.jit(delta.delta_replay_scan)
jit_chunks = jax.jit(delta_chunks, static_argnums=2)
jit_steps = jax.jit(delta_steps)


def near(results, expected, tolerance=TOLERANCE):
    for got, wanted in zip(results, expected, strict=True):
        assert got.dtype == jnp.float32
        assert_near(got, wanted, tolerance)


def far(wrong, expected, tolerance=TOLERANCE):
    """Checks that a mistake's result is far outside of the tolerance, or not finite."""
    error = np.abs(np.float64(wrong) - expected).max() / np.abs(expected).max()
    assert not error < 1e3 * tolerance


# delta_scan


@all_shapes
@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
@given(seed=seeds)
def test_computes_the_recurrence_along_each_path(shape, extreme, seed):
    """Extreme decays are 0 and -10000 on the same path."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs, h0 = delta_inputs(rng, shape, extreme)
    near(jit_scan(inputs, h0, masks_of(parents)), delta_tree(inputs, h0, parents)[:2])


@both_decays
@pytest.mark.parametrize("tree", [chain, star, binary, random_tree])
def test_trees_of_64_nodes(shape, tree):
    rng = np.random.default_rng(1)
    shape = shape._replace(T=64, batch=1)
    kind = partial(tree, rng) if tree is random_tree else tree
    parents = kind(shape.T)[None]
    inputs, h0 = delta_inputs(rng, shape)
    y, u, _ = delta_tree(inputs, h0, parents)
    near(jit_scan(inputs, h0, masks_of(parents)), (y, u))
    causal = np.tril(np.ones((1, 64, 64), bool))
    if tree is not chain:  # siblings must not meet
        far(jit_scan(inputs, h0, causal)[0], y)


@given(seed=seeds)
def test_any_partial_order(seed):
    rng = np.random.default_rng(seed)
    orders = np.stack([random_order(rng, SHAPE.T) for _ in range(SHAPE.batch)])
    rank = np.argsort(orders.sum(axis=2), axis=1, kind="stable")  # ancestors first
    mask = np.stack([z[np.ix_(r, r)] for z, r in zip(orders, rank, strict=True)])
    inputs, h0 = delta_inputs(rng, SHAPE)
    near(jit_scan(inputs, h0, mask), delta_order(inputs, h0, mask), 2 * TOLERANCE)


def test_heads_read_the_key_of_their_group():
    """Neighbouring heads share a key; a mistake is to repeat the key heads in turn."""
    rng = np.random.default_rng(2)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    inputs, h0 = delta_inputs(rng, SHAPE)
    exact = delta_tree(inputs, h0, parents)[0]
    heads = np.arange(SHAPE.heads)
    tiled = heads % SHAPE.groups
    each = {n: getattr(inputs, n)[:, :, tiled] for n in inputs._fields[:4]}
    far(jit_scan(inputs._replace(**each), h0, masks_of(parents))[0], exact)
    shared = heads // (SHAPE.heads // SHAPE.groups)
    each = {n: getattr(inputs, n)[:, :, shared] for n in inputs._fields[:4]}
    near(jit_scan(inputs._replace(**each), h0, masks_of(parents))[:1], [exact])


@both_decays
@given(seed=seeds)
def test_level_by_level(shape, seed):
    """The first group holds a chain; dropped rows have large values."""
    rng = np.random.default_rng(seed)
    T, parents = 9, np.array([-1, 0, 1, 2, 2, 3, 4, 4, 0])
    parents = np.broadcast_to(parents, (shape.batch, T))
    mask = masks_of(parents)
    inputs, h0 = delta_inputs(rng, shape._replace(T=T))
    once = delta_tree(inputs, h0, parents)
    u, dropped = np.full(once[1].shape, 1e4, np.float32), np.array([T, T + 5])
    for group in ([0, 1, 2], [3, 4, 8], [6, 5, 7]):
        rows = np.concatenate([group, dropped]).astype(np.int32)
        some = queries(inputs, np.minimum(rows, T - 1))
        some.v[:, len(group) :] = 1e4
        y, u = jit_scan(some, h0, mask, rows, u)
        near([y[:, : len(group)]], [once[0][:, group]], 2 * TOLERANCE)
        near([u[:, group]], [once[1][:, group]], 2 * TOLERANCE)
    near([u], once[1:2], 2 * TOLERANCE)


@both_decays
def test_padding_has_no_effect(shape):
    """Its rows and columns of the mask are empty, and its values are large."""
    rng = np.random.default_rng(3)
    T, live = shape.T, 6
    parents = np.stack([binary(T)] * shape.batch)
    mask = masks_of(parents)
    mask[:, live:], mask[:, :, live:] = False, False
    inputs, h0 = delta_inputs(rng, shape)
    exact = delta_tree(inputs, h0, parents)[:2]
    for value in (0.0, 1e12):
        for name in ("q", "k", "v"):
            getattr(inputs, name)[:, live:] = value
        found = jit_scan(inputs, h0, mask)
        assert all(np.isfinite(z).all() for z in found)
        near([z[:, :live] for z in found], [z[:, :live] for z in exact])


@both_decays
def test_reads_ancestors_only(shape):
    """Large values off a node's path do not change its results, bit for bit."""
    rng = np.random.default_rng(4)
    parents = random_parents(rng, shape.batch, shape.T)
    mask = masks_of(parents)
    inputs, h0 = delta_inputs(rng, shape)
    before = jit_scan(inputs, h0, mask)
    node = 5
    for b in range(shape.batch):
        off = ~mask[b, node]
        inputs.v[b, off], inputs.q[b, off], inputs.a[b, off] = 1e12, -1e6, -1e5
        inputs.beta[b, off] = 2.0
    after = jit_scan(inputs, h0, mask)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[:, node], old[:, node])


def test_a_chain_of_equal_keys():
    """Repeated text has such keys. The powers of the system cancel there."""
    T = 64
    inputs, h0 = equal_keys(T, 1, 3, 8)
    parents = chain(T)[None]
    y, u, _ = delta_tree(inputs, h0, parents)
    near(jit_scan(inputs, h0, masks_of(parents)), (y, u), 8 * TOLERANCE)
    near(jit_chunks(inputs, h0, T), (y, u), 8 * TOLERANCE)

    left = 2 * np.tril(np.ones((T, T), np.float32), -1)
    inverse, power = np.eye(T, dtype=np.float32), -left
    for _ in range(6):  # the product of I + (-left)^(2^j)
        inverse, power = inverse + inverse @ power, power @ power
    k = inputs.k[0, :, 0] * inputs.k_scale[0, :, 0, None]
    far(inverse @ (2 * (inputs.v[0, :, 0] - k @ h0[0, 0].T)), u[0, :, 0])


@both_decays
def test_decays_are_masked_before_exp(shape):
    """Without jit, because XLA:CPU turns 0 * inf into a select, which hides the bug."""
    rng = np.random.default_rng(5)
    parents = np.stack([star(shape.T), binary(shape.T)])
    inputs, h0 = delta_inputs(rng, shape, extreme=True)
    with jax.disable_jit():
        args = jax.tree.map(jnp.asarray, (inputs, h0, masks_of(parents)))
        found = delta.delta_scan(*args)
    near(found, delta_tree(inputs, h0, parents)[:2])


@both_decays
@pytest.mark.parametrize("strong", [0.0, -5.0, -80.0, -5000.0])
def test_keeps_accuracy_past_strong_decays(shape, strong):
    """Strong decays must not reduce the accuracy of later small ones. Two mistakes do:
    a difference of plain sums, and a factor for either side of a product."""
    rng = np.random.default_rng(6)
    shape = shape._replace(T=64, batch=1)
    parents = chain(shape.T)[None]
    inputs, h0 = delta_inputs(rng, shape)
    a = -rng.uniform(0.01, 0.1, inputs.a.shape).astype(np.float32)
    a[:, ::4] += np.float32(strong)
    inputs = inputs._replace(a=a)
    exact = delta_tree(inputs, h0, parents)[:2]
    near(jit_scan(inputs, h0, masks_of(parents)), exact)
    near(jit_chunks(inputs, h0, 16), exact)
    if strong == -5000.0:
        total = np.cumsum(a, axis=1, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            factored = np.exp(total[:, -1]) * np.exp(-total[:, -2])
        far(factored, np.exp(np.float64(a[:, -1])))
        far(np.exp(total[:, -1] - total[:, -2]), np.exp(np.float64(a[:, -1])), 1e-7)


def test_bfloat16_equals_float32_of_the_same_values():
    rng = np.random.default_rng(7)
    mask = masks_of(random_parents(rng, SHAPE.batch, SHAPE.T))
    inputs, h0 = delta_inputs(rng, SHAPE, dtype="bfloat16")
    wide = jax.tree.map(lambda z: z.astype(np.float32), inputs)
    near(jit_scan(inputs, h0, mask), jit_scan(wide, h0, mask), 1e-6)


# Chains


@both_decays
@given(seed=seeds)
def test_steps_are_the_recurrence(shape, seed):
    rng = np.random.default_rng(seed)
    parents = np.stack([chain(shape.T)] * shape.batch)
    inputs, h0 = delta_inputs(rng, shape, extreme=True)
    near(jit_steps(inputs, h0), delta_tree(inputs, h0, parents)[:2])


@both_decays
def test_one_token_is_a_step(shape):
    inputs, h0 = delta_inputs(np.random.default_rng(8), shape._replace(T=1))
    mask = np.ones((shape.batch, 1, 1), bool)
    near(jit_scan(inputs, h0, mask), jit_steps(inputs, h0), 1e-6)


@both_decays
@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
@pytest.mark.parametrize("T, chunk", [(11, 4), (8, 4), (3, 8), (5, 1), (70, 64)])
def test_chunks_are_the_recurrence(shape, extreme, T, chunk):
    rng = np.random.default_rng(T)
    shape = shape._replace(T=T)
    parents = np.stack([chain(T)] * shape.batch)
    inputs, h0 = delta_inputs(rng, shape, extreme)
    near(jit_chunks(inputs, h0, chunk), delta_tree(inputs, h0, parents)[:2])


# delta_replay


@both_decays
@given(seed=seeds)
def test_replay_is_the_state_of_the_last_node(shape, seed):
    """The u of a tree serve each of its paths."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs, h0 = delta_inputs(rng, shape)
    u, states = delta_tree(inputs, h0, parents)[1:]
    node = rng.integers(shape.T, size=shape.batch)
    paths = [path_to(p, t) for p, t in zip(parents, node, strict=True)]
    length = np.array([len(p) for p in paths], np.int32)
    path = np.zeros((shape.batch, shape.T), np.int32)
    for row, nodes in zip(path, paths, strict=True):
        row[: len(nodes)] = nodes
    h = jit_replay(h0, past_of(inputs, u.astype(np.float32), path, length))
    near([h], [states[np.arange(shape.batch), node]])


@both_decays
@given(seed=seeds)
def test_replay_ignores_the_rest_of_the_path(shape, seed):
    """Large values past the length have no effect; length 0 returns h0 bit for bit."""
    rng = np.random.default_rng(seed)
    h0, past, _ = replayed_inputs(rng, shape)
    past.length[0] = 0
    before = jit_replay(h0, past)
    for b in range(shape.batch):
        rest = np.setdiff1d(np.arange(20), past.path[b, : past.length[b]])
        past.u[b, rest], past.k[b, rest], past.a[b, rest] = 1e15, -1e15, -1e5
    after = jit_replay(h0, past)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(after[0], h0[0])
    near([after], [delta_path(h0, past)])


def test_replay_reads_only_the_path():
    """Kernels leave rows of padding as they are, which may be NaN. A path past its
    length may name such rows."""
    shape = Shape(2, 9, 2, 2, 5, 6, by_column=True)
    h0, past, _ = replayed_inputs(np.random.default_rng(0), shape)
    wanted = jit_replay(h0, past)
    for b in range(shape.batch):
        rest = np.setdiff1d(np.arange(20), past.path[b, : past.length[b]])
        for z in past[:4]:
            z[b, rest] = np.nan
        past.path[b, past.length[b] :] = rest[0]
    np.testing.assert_array_equal(jit_replay(h0, past), wanted)


@both_decays
@given(seed=seeds)
def test_replay_scan_is_replay_then_scan(shape, seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    h0, past, inputs = replayed_inputs(rng, shape, extreme=True)
    h = delta_path(h0, past)
    y, u, _ = delta_tree(inputs, h, parents)
    near(jit_replay_scan(h0, past, inputs, masks_of(parents)), (y, u, h))


# Gradients


@both_decays
def test_gradients_are_those_of_the_steps(shape):
    rng = np.random.default_rng(9)
    inputs, h0 = delta_inputs(rng, shape)
    mask = masks_of(np.stack([chain(shape.T)] * shape.batch))
    toward = normal(rng, shape.batch, shape.T, shape.heads, shape.P)

    def gradients(function):
        def total(inputs, h0):
            y, u = function(inputs, h0)
            return (toward * y).sum() + jnp.square(u).sum()

        return jax.jit(jax.grad(total, argnums=(0, 1)))(inputs, h0)

    expected = jax.tree.leaves(gradients(delta_steps))
    masked = gradients(lambda *z: delta.delta_scan(*z, mask))
    chunked = gradients(lambda *z: delta_chunks(*z, 4))
    for found in (masked, chunked):
        for got, wanted in zip(jax.tree.leaves(found), expected, strict=True):
            assert_near(got, wanted, 1e-5)


@pytest.mark.parametrize(
    "shape, eager",
    [(SHAPE, False), (BY_COLUMN, False), (SHAPE._replace(T=4), True)],
    ids=["by head", "by column", "eager"],
)
def test_gradients_of_extreme_decays_are_finite(shape, eager):
    rng = np.random.default_rng(10)
    inputs, h0 = delta_inputs(rng, shape, extreme=True)
    parents = np.stack([star(shape.T), binary(shape.T)])
    u = np.zeros(inputs.v.shape, np.float32)
    path, length = random_paths(rng, shape.batch, shape.T, 4)

    def total(h0, u, inputs):
        past = past_of(inputs, u, path, length)
        y, u, h = delta.delta_replay_scan(h0, past, inputs, masks_of(parents))
        return jnp.square(y).sum() + jnp.square(u).sum() + jnp.square(h).sum()

    gradient = jax.grad(total, argnums=(0, 1, 2))
    run = gradient if eager else jax.jit(gradient)
    found = run(*jax.tree.map(jnp.asarray, (h0, u, inputs)))
    assert all(np.isfinite(z).all() for z in jax.tree.leaves(found))
