"""Test the GPU kernel of the gated delta rule: results in the interpreter, and lowering
for CUDA.

The interpreter accepts shapes and operations that the compiler rejects, so every case
is also lowered for CUDA, which needs no GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import delta, triton_blocks, triton_delta
from stree_jax.pallas_kernels.triton_blocks import Blocks
from stree_jax.pallas_kernels.triton_delta import unsupported
from tests.support.deltas import (
    TOLERANCE,
    Shape,
    delta_inputs,
    delta_order,
    delta_path,
    delta_tree,
    equal_keys,
    queries,
    replayed_inputs,
)
from tests.support.lowering import lowered
from tests.support.reference import (
    assert_near,
    binary,
    chain,
    random_order,
    random_parents,
    random_tree,
    star,
)
from tests.support.scans import masks_of

CALL = "__gpu$xla.gpu.triton"
CASES = {
    "one token": Shape(2, 1, 2, 1, 16, 16),
    "7 tokens, heads share keys": Shape(2, 7, 6, 2, 16, 32),
    "16 tokens": Shape(1, 16, 2, 1, 32, 64),
    "33 tokens": Shape(2, 33, 2, 2, 16, 16),
    "64 tokens": Shape(1, 64, 2, 1, 32, 32),
    "sizes no powers of two": Shape(1, 20, 3, 3, 48, 80),
    "one token, by column": Shape(2, 1, 2, 1, 16, 16, True),
    "7 tokens, by column": Shape(2, 7, 6, 2, 16, 32, True),
    "33 tokens, by column": Shape(1, 33, 2, 2, 16, 48, True),
}
all_cases = pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
both_decays = pytest.mark.parametrize(
    "by_column", [False, True], ids=["by head", "by column"]
)

interpreted_replay = partial(triton_delta.delta_replay_scan, interpret=True)
interpreted_scan = partial(triton_delta.delta_scan, interpret=True)
jit_replay = jax.jit(interpreted_replay)
jit_scan = jax.jit(interpreted_scan)


def near(results, expected, tolerance=TOLERANCE):
    for got, wanted in zip(results, expected, strict=True):
        assert got.dtype == jnp.float32
        assert_near(got, wanted, tolerance)


def expected_of(inputs, parents):
    """Returns y, u and the replayed state in float64."""
    h0, past, tree, _ = inputs
    h = delta_path(h0, past)
    return *delta_tree(tree, h, parents)[:2], h


def case(shape, seed=0, **options):
    """Returns arguments of delta_replay_scan, and the tree's parents."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    return (*replayed_inputs(rng, shape, **options), masks_of(parents)), parents


# The definition


@all_cases
@dtypes
def test_delta_replay_scan_computes_the_recurrence(shape, dtype):
    """Products with a bfloat16 factor are exact, so one tolerance serves both."""
    inputs, parents = case(shape, shape.T, dtype=dtype)
    near(jit_replay(*inputs), expected_of(inputs, parents))


@all_cases
def test_lowers_for_cuda(shape):
    for dtype in ("float32", "bfloat16"):
        inputs, _ = case(shape, dtype=dtype)
        text = lowered(triton_delta.delta_replay_scan, inputs, "cuda")
        groups = -(-shape.T // 16) if shape.by_column and shape.T > 32 else 1
        assert text.count(CALL) == groups
        h0, _, tree, mask = inputs
        assert CALL in lowered(triton_delta.delta_scan, (tree, h0, mask), "cuda")
        rows, u = np.arange(min(shape.T, 3), dtype=np.int32), np.float32(tree.v)
        args = queries(tree, rows), h0, mask, rows, u
        assert CALL in lowered(triton_delta.delta_scan, args, "cuda")


@both_decays
@pytest.mark.parametrize("tree", [chain, star, binary, random_tree])
def test_trees_with_extreme_decays(tree, by_column):
    """Decays of 0 and -10000 on the same path."""
    rng = np.random.default_rng(5)
    shape = Shape(2, 13, 4, 2, 16, 32, by_column)
    kind = partial(tree, rng) if tree is random_tree else tree
    parents = np.stack([kind(shape.T)] * shape.batch)
    inputs = *replayed_inputs(rng, shape, extreme=True), masks_of(parents)
    near(jit_replay(*inputs), expected_of(inputs, parents))


@pytest.mark.parametrize("strong", [-80.0, -5000.0])
def test_keeps_accuracy_past_strong_decays_by_column(strong):
    """A difference of plain sums does not, nor does a factor for either side."""
    rng = np.random.default_rng(6)
    inputs, h0 = delta_inputs(rng, Shape(1, 32, 2, 1, 16, 16, True))
    a = -rng.uniform(0.01, 0.1, inputs.a.shape).astype(np.float32)
    a[:, ::4] += np.float32(strong)
    parents = chain(32)[None]
    inputs = inputs._replace(a=a)
    expected = delta_tree(inputs, h0, parents)[:2]
    near(jit_scan(inputs, h0, masks_of(parents)), expected)


def test_a_chain_of_equal_keys(optimised):
    """Repeated text has such keys. The powers of the system cancel there.

    Without optimisation, XLA:CPU (0.10.2) computes one element wrongly.
    """
    inputs, h0 = equal_keys(64, 2, 16, 16)
    parents = chain(64)[None]
    expected = delta_tree(inputs, h0, parents)[:2]
    scan = jax.jit(interpreted_scan)
    near(scan(inputs, h0, masks_of(parents)), expected, 8 * TOLERANCE)


def test_any_partial_order():
    rng = np.random.default_rng(3)
    shape = Shape(1, 9, 2, 1, 16, 16)
    order = random_order(rng, shape.T)
    rank = np.argsort(order.sum(axis=1), kind="stable")  # ancestors first
    mask = order[np.ix_(rank, rank)][None]
    inputs, h0 = delta_inputs(rng, shape)
    near(jit_scan(inputs, h0, mask), delta_order(inputs, h0, mask), 2 * TOLERANCE)


@both_decays
@dtypes
@pytest.mark.parametrize("T", [9, 33])
def test_level_by_level(dtype, T, by_column):
    """The first group holds a chain; dropped rows have large values, and u has them
    where no token was queried."""
    rng = np.random.default_rng(T)
    shape = Shape(2, T, 4, 2, 16, 16, by_column)
    parents = np.array([-1, 0, 1, 2, 2, 3, 4, 4, 0, *rng.integers(0, 9, T - 9)])
    parents = np.broadcast_to(parents, (shape.batch, T))
    mask = masks_of(parents)
    inputs, h0 = delta_inputs(rng, shape, dtype=dtype)
    y_once, u_once, _ = delta_tree(inputs, h0, parents)
    u, dropped = np.full(u_once.shape, 1e4, np.float32), np.array([T, T + 5])
    for group in ([0, 1, 2], [3, 4, 8], [6, 5, 7], [*range(9, T)]):
        if not group:
            continue
        rows = np.concatenate([group, dropped]).astype(np.int32)
        some = queries(inputs, np.minimum(rows, T - 1))
        some.v[:, len(group) :] = 1e4
        y, u = jit_scan(some, h0, mask, rows, u)
        near([y[:, : len(group)]], [y_once[:, group]], 2 * TOLERANCE)
        near([u[:, group]], [u_once[:, group]], 2 * TOLERANCE)
    near([u], [u_once], 2 * TOLERANCE)


def test_rows_that_are_all_tokens():
    """They give what a pass over all tokens gives."""
    inputs, _ = case(Shape(1, 17, 2, 1, 16, 16))
    h0, _, tree, mask = inputs
    rows = np.arange(17, dtype=np.int32)
    near(jit_scan(tree, h0, mask, rows), jit_scan(tree, h0, mask), 1e-6)


@both_decays
def test_the_length_of_the_path(by_column):
    """Length 0 returns h0 bit for bit; rows past the length have no effect."""
    inputs, parents = case(Shape(3, 7, 2, 1, 16, 32, by_column), seed=4)
    h0, past = inputs[:2]
    path, length = past.path, past.length
    length[:] = 0, 3, path.shape[1]
    before = jit_replay(*inputs)
    for b in range(len(h0)):
        rest = np.setdiff1d(np.arange(past.u.shape[1]), path[b, : length[b]])
        past.u[b, rest], past.k[b, rest], past.a[b, rest] = 1e15, -1e15, -1e5
        path[b, length[b] :] = 10**6
    after = jit_replay(*inputs)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    np.testing.assert_array_equal(after[2][0], h0[0])
    near(after, expected_of(inputs, parents))


@both_decays
def test_padding_has_no_effect(by_column):
    """Its rows and columns of the mask are empty, and its values are large."""
    (h0, past, tree, _), _ = case(Shape(2, 21, 2, 1, 16, 16, by_column), seed=6)
    live, parents = 18, np.stack([binary(21)] * 2)
    mask = masks_of(parents)
    mask[:, live:], mask[:, :, live:] = False, False
    exact = expected_of((h0, past, tree, mask), parents)
    for value in (0.0, 1e12):
        for name in ("q", "k", "v"):
            getattr(tree, name)[:, live:] = value
        y, u, _ = jit_replay(h0, past, tree, mask)
        assert np.isfinite(y).all() and np.isfinite(u).all()
        near([y[:, :live], u[:, :live]], [z[:, :live] for z in exact[:2]])


@both_decays
def test_reads_ancestors_only(by_column):
    """Large values off a node's path do not change its results, bit for bit."""
    (h0, past, tree, mask), _ = case(Shape(2, 21, 2, 2, 16, 16, by_column), seed=7)
    before = jit_replay(h0, past, tree, mask)
    node = 11
    for b in range(2):
        off = ~mask[b, node]
        tree.v[b, off], tree.q[b, off], tree.a[b, off] = 1e12, -1e6, -1e5
        tree.beta[b, off] = 2.0
    after = jit_replay(h0, past, tree, mask)
    for old, new in zip(before[:2], after[:2], strict=True):
        np.testing.assert_array_equal(new[:, node], old[:, node])


def test_later_tokens_do_not_matter():
    """The first 20 tokens of 32 are those of a tree of 20, bit for bit: both are in a
    block of 32."""
    (h0, past, tree, mask), _ = case(Shape(1, 32, 2, 1, 16, 16), seed=8)
    y, u, _ = jit_replay(h0, past, tree, mask)
    fewer = jax.tree.map(lambda z: z[:, :20], tree)
    y_fewer, u_fewer, _ = jit_replay(h0, past, fewer, mask[:, :20, :20])
    np.testing.assert_array_equal(y_fewer, y[:, :20])
    np.testing.assert_array_equal(u_fewer, u[:, :20])


@pytest.mark.parametrize("tree", [star, binary])
def test_decays_are_masked_before_exp(tree):
    """Without jit, because XLA:CPU turns 0 * inf into a select, which hides the bug."""
    T = 9
    mask = masks_of(tree(T)[None])[0]
    tile = jnp.asarray(np.pad(mask, (0, 16 - T), mode="edge").astype(np.int8))
    scale, a = np.full(16, 0.5, np.float32), np.full(16, -100, np.float32)
    with jax.disable_jit():
        _, weight = triton_blocks.weights(tile, tile, *map(jnp.asarray, (a, scale)), T)
    total = mask @ a[:T].astype(np.float64)
    decay = np.exp(np.where(mask, total[:, None] - total, -np.inf))
    assert_near(weight[:T, :T], decay * 0.5, TOLERANCE)


@pytest.mark.parametrize(
    "dtype, blocks",
    [
        ("float32", Blocks(16, 16, num_stages=1)),
        ("bfloat16", Blocks(32, 64, num_warps=8, precision="bf16x3")),
        ("bfloat16", Blocks(precision="highest")),
    ],
    ids=["small", "large", "no tensor cores"],
)
def test_blocks_change_nothing_but_speed(dtype, blocks):
    inputs, parents = case(Shape(1, 5, 2, 1, 32, 64), seed=9, dtype=dtype)
    found = jax.jit(partial(interpreted_replay, blocks=blocks))(*inputs)
    near(found, expected_of(inputs, parents))
    cut = partial(triton_delta.delta_replay_scan, blocks=blocks)
    assert CALL in lowered(cut, inputs, "cuda")


# Inside other programs


def test_under_vmap():
    each = [case(Shape(2, 5, 2, 1, 16, 16), seed)[0] for seed in range(2)]
    stacked = jax.tree.map(lambda *z: jnp.stack(z), *each)
    expected = jax.jit(jax.vmap(delta.delta_replay_scan))(*stacked)
    near(jax.jit(jax.vmap(interpreted_replay))(*stacked), expected)
    assert CALL in lowered(jax.vmap(triton_delta.delta_replay_scan), stacked, "cuda")


def test_in_a_while_loop():
    (h0, past, tree, mask), _ = case(Shape(2, 5, 2, 1, 16, 16), T0=5, M=4)

    def run(op, h0, past):
        def step(carry):
            i, h, past, total = carry
            y, u, h = op(h, past, tree, mask)
            past = past._replace(u=u, k=tree.k, k_scale=tree.k_scale, a=tree.a)
            return i + 1, h, past, total + y

        carry = jnp.int32(0), h0, past, jnp.zeros_like(tree.v)
        _, h, _, total = jax.lax.while_loop(lambda c: c[0] < 3, step, carry)
        return total, h

    args = jax.tree.map(jnp.asarray, (h0, past))
    expected = jax.jit(partial(run, delta.delta_replay_scan))(*args)
    near(jax.jit(partial(run, interpreted_replay))(*args), expected)
    assert CALL in lowered(partial(run, triton_delta.delta_replay_scan), args, "cuda")


def test_the_state_is_updated_in_place():
    inputs, _ = case(CASES["16 tokens"])
    text = lowered(triton_delta.delta_replay_scan, inputs, "cuda")
    call = next(line for line in text.splitlines() if CALL in line)
    alias = "output_tuple_indices = [0], operand_index = 0, operand_tuple_indices = []"
    assert f"output_operand_alias<{alias}>" in call


# Unsupported arguments


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def reason(T=8, P=128, N=96, qk=jnp.bfloat16, v=jnp.bfloat16, u=jnp.float32, M=5):
    k, scale, a = spec(1, T, 2, N, dtype=qk), spec(1, T, 2), spec(1, T, 4)
    v, u = spec(1, T, 4, P, dtype=v), spec(1, T, 4, P, dtype=u)
    path, length = spec(1, M, dtype=jnp.int32), spec(1, dtype=jnp.int32)
    inputs = delta.DeltaInputs(k, scale, k, scale, v, a, a)
    past = delta.DeltaReplayed(u, k, scale, a, path, length)
    return unsupported(inputs, spec(1, T, T, dtype=jnp.bool_), past)


def test_unsupported():
    assert reason() is None
    assert reason(T=1, P=16, N=16, qk=jnp.float32, v=jnp.float32) is None
    assert reason(T=65) == "65 tokens are more than 64"
    assert reason(M=65) == "a path of 65 tokens is longer than 64"
    assert reason(P=8) == "the head size 8 is not a multiple of 16"
    assert reason(N=24) == "the state size 24 is not a multiple of 16"
    assert reason(v=jnp.float16) == "v is float16, neither float32 nor bfloat16"
    assert reason(qk=jnp.int8) == "q is int8, neither float32 nor bfloat16"
    found = reason(u=jnp.float16)
    assert found == "the recorded u is float16, neither float32 nor bfloat16"
