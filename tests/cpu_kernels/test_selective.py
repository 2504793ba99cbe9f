"""Test the compiled selective scan and replay against float64, and their
reproducibility."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import (
    SelectiveInputs,
    SelectiveReplayed,
    parents_of,
    selective_replay,
    selective_replay_scan,
)
from tests.support.native import built, each_level, use
from tests.support.reference import OP_TOLERANCE, assert_near, mask_of, random_parents

pytestmark = built
TOLERANCE = OP_TOLERANCE["float32"]
# Batch, nodes, nodes of the last tree, channels, states per channel.
SHAPES = {
    "one token": (2, 1, 1, 3, 4),
    "odd": (3, 9, 5, 37, 5),
    "whole lanes": (1, 16, 16, 64, 16),
    "all nodes": (2, 64, 8, 16, 16),
}


def case(shape, seed=0, dtype="float32", parents=None):
    """Returns the kernel's arguments except rows, and the parents."""
    batch, T, last, D, N = shape
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, batch, T) if parents is None else parents

    def tokens(count):
        x = jnp.asarray(rng.normal(size=(batch, count, D)), dtype)
        dt = rng.exponential(size=(batch, count, D)) * (rng.random(D) < 0.8)
        return x, dt.astype(np.float32), normal(batch, count, N)

    def normal(*sizes):
        return rng.normal(size=sizes).astype(np.float32)

    A = -np.exp(2 * normal(1, N, D)).repeat(batch, 0)
    path = rng.integers(0, last, (batch, 4)).astype(np.int32)
    length = rng.integers(0, 5, batch).astype(np.int32)
    past = SelectiveReplayed(*tokens(last), path, length)
    x, dt, B = tokens(T)
    inputs = SelectiveInputs(x, dt, B, normal(batch, T, N), A, normal(D))
    table = np.asarray(parents, np.int32)
    return (normal(batch, N, D), past, inputs, table), parents


def exact(args):
    """Returns y and the replayed state in float64."""
    h0, past, inputs, parents = jax.tree.map(
        lambda z: np.asarray(z, np.float64 if z.dtype != np.int32 else z.dtype), args
    )

    def after(h, A, x, dt, B):
        return np.exp(dt * A) * h + dt * x * B[:, None]

    ys, states = [], []
    for b in range(len(h0)):
        h, A = h0[b], inputs.A[b]
        for j in past.path[b, : past.length[b]]:
            h = after(h, A, past.x[b, j], past.dt[b, j], past.B[b, j])
        states.append(h)
        nodes, y = [], []
        for t, parent in enumerate(parents[b]):
            above = h if parent < 0 else nodes[parent]
            x = inputs.x[b, t]
            nodes.append(after(above, A, x, inputs.dt[b, t], inputs.B[b, t]))
            y.append(inputs.C[b, t] @ nodes[-1] + inputs.D * x)
        ys.append(np.stack(y))
    return np.stack(ys), np.stack(states)


def run(*args, chain=False, replays=True, rows=None):
    options = dict(chain=chain, replays=replays)
    return jax.jit(partial(selective_replay_scan, **options))(*args, rows)


@each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_the_recurrence_along_each_path(level, shape, dtype, monkeypatch):
    use(monkeypatch, level)
    args, _ = case(shape, dtype=dtype)
    wanted_y, wanted_h = exact(args)
    y, h = run(*args)
    assert_near(y, wanted_y, TOLERANCE)
    assert_near(h, wanted_h, TOLERANCE)
    h0, past, inputs, _ = args
    alone = jax.jit(selective_replay)(h0, past, inputs.A)
    np.testing.assert_array_equal(alone, h)
    fresh, none = run(h, *args[1:], replays=False)
    np.testing.assert_array_equal(fresh, y)
    assert none.size == 0


def test_a_chain_of_any_length():
    shape = (2, 300, 3, 20, 6)
    args, _ = case(shape, parents=np.broadcast_to(np.arange(300) - 1, (2, 300)))
    np.testing.assert_array_equal(run(*args, chain=True)[0], run(*args)[0])
    assert_near(run(*args, chain=True)[0], exact(args)[0], TOLERANCE)


def test_queried_nodes_have_the_results_of_the_whole_tree():
    args, _ = case(SHAPES["odd"])
    y, _ = run(*args)
    rows = np.array([1, 4, 7, 9, 99], np.int32)  # the last two are past the nodes
    h0, past, inputs, parents = args
    some = inputs._replace(C=inputs.C[:, rows % 9])
    found, _ = run(h0, past, some, parents, rows=rows)
    np.testing.assert_array_equal(found[:, :3], y[:, rows[:3]])


@each_level
def test_results_do_not_depend_on_other_rows_and_nodes(level, monkeypatch):
    use(monkeypatch, level)
    args, _ = case(SHAPES["odd"])
    y, h = run(*args)
    for b, T in ((0, 9), (1, 9), (2, 1), (2, 5)):
        h0, past, (x, dt, B, C, A, D), parents = args
        now = (z[b : b + 1, :T] for z in (x, dt, B, C))
        inputs = SelectiveInputs(*now, A[b : b + 1], D)
        last = SelectiveReplayed(*(z[b : b + 1] for z in past))
        one = run(h0[b : b + 1], last, inputs, parents[b : b + 1, :T])
        np.testing.assert_array_equal(one[0][0], y[b, :T])
        np.testing.assert_array_equal(one[1][0], h[b])


def test_near_the_definition():
    args, _ = case(SHAPES["odd"])
    wanted = selective_replay_scan.definition(*args, None, chain=False, replays=True)
    for ours, theirs in zip(run(*args), wanted, strict=True):
        assert_near(ours, theirs, TOLERANCE)


def test_a_path_out_of_the_tree_is_refused():
    (h0, past, inputs, parents), _ = case(SHAPES["odd"])
    wrong = past._replace(path=past.path + 5, length=past.length * 0 + 1)
    with pytest.raises(Exception, match="a path leads out of its tree"):
        jax.block_until_ready(run(h0, wrong, inputs, parents))
    with pytest.raises(Exception, match="a parent comes after its child"):
        jax.block_until_ready(run(h0, past, inputs, parents + 20))


def test_parents_of_a_mask_with_padding():
    parents = random_parents(np.random.default_rng(0), 2, 8)
    mask = np.stack([mask_of(row) for row in parents])
    np.testing.assert_array_equal(parents_of(jnp.asarray(mask)), parents)
    mask[0, 6:] = mask[0, :, 6:] = False
    found = np.asarray(parents_of(jnp.asarray(mask)))
    assert found[0, 6:].tolist() == [-2, -2]
    np.testing.assert_array_equal(found[0, :6], parents[0, :6])
