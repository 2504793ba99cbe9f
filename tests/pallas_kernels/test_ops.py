"""Test the operations against recurrences along every path in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stree_jax.pallas_kernels import (
    Replayed,
    ScanInputs,
    chunk_scan,
    commit_window,
    replay,
    replay_tree_scan,
    tree_attention,
    tree_conv,
    tree_scan,
)
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    attend_tree,
    binary,
    chain,
    conv_tree,
    mask_of,
    path_to,
    random_order,
    random_parents,
    scan_order,
    scan_tree,
    star,
    step_path,
    window_of,
)
from tests.support.scans import (
    Shape,
    masks_of,
    normal,
    of_arrays,
    random_paths,
    scan_inputs,
)

TOLERANCE = OP_TOLERANCE["float32"]
seeds = st.integers(0, 2**32 - 1)


SHAPES = {
    "one token": Shape(2, 1, 2, 1, 3, 4),
    "one head": Shape(1, 8, 1, 1, 4, 5),
    "one group": Shape(2, 7, 4, 1, 3, 4),
    "two groups": Shape(2, 9, 4, 2, 3, 5, True),
    "a group per head": Shape(3, 5, 3, 3, 2, 3),
}
SHAPE = SHAPES["two groups"]
all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


jit_tree_scan = jax.jit(of_arrays(tree_scan))
jit_replay = jax.jit(replay)
jit_replay_tree_scan = jax.jit(replay_tree_scan)
jit_chunk_scan = jax.jit(of_arrays(chunk_scan), static_argnames="chunk")
jit_tree_conv = jax.jit(tree_conv)
jit_commit_window = jax.jit(commit_window)
jit_tree_attention = jax.jit(tree_attention)


# tree_scan


@all_shapes
@given(seed=seeds)
def test_tree_scan_computes_the_recurrence_along_each_path(shape, seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs = scan_inputs(rng, shape)
    y = jit_tree_scan(*inputs, masks_of(parents))
    assert y.dtype == jnp.float32
    assert_near(y, scan_tree(*inputs, parents), TOLERANCE)


@given(seed=seeds)
def test_tree_scan_of_any_partial_order(seed):
    rng = np.random.default_rng(seed)
    orders = np.stack([random_order(rng, SHAPE.T) for _ in range(SHAPE.batch)])
    inputs = scan_inputs(rng, SHAPE)
    y = jit_tree_scan(*inputs, orders)
    assert_near(y, scan_order(*inputs, orders), TOLERANCE)


@given(seed=seeds)
def test_tree_scan_of_some_rows(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    rows = rng.permutation(SHAPE.T)[:4].astype(np.int32)
    x, dt, a, B, C, D, h0 = scan_inputs(rng, SHAPE)
    C = C[:, rows]
    y = jit_tree_scan(x, dt, a, B, C, D, h0, masks_of(parents), rows)
    assert_near(y, scan_tree(x, dt, a, B, C, D, h0, parents, rows), TOLERANCE)


@given(seed=seeds)
def test_tree_scan_of_extreme_steps(seed):
    """Path sums of a near -5000 neither overflow nor reduce accuracy."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    inputs = scan_inputs(rng, SHAPE, extreme=True)
    y = jit_tree_scan(*inputs, masks_of(parents))
    assert_near(y, scan_tree(*inputs, parents), TOLERANCE)


@pytest.mark.parametrize("shape_of", [star, binary], ids=["star", "binary"])
def test_tree_scan_without_jit(shape_of):
    """Under jit XLA:CPU turns 0 * inf into a select and would hide a late mask."""
    rng = np.random.default_rng(1)
    parents = np.broadcast_to(shape_of(SHAPE.T), (SHAPE.batch, SHAPE.T))
    inputs = scan_inputs(rng, SHAPE, extreme=True)
    with jax.disable_jit():
        args = map(jnp.asarray, (*inputs, masks_of(parents)))
        y = of_arrays(tree_scan)(*args)
    assert_near(y, scan_tree(*inputs, parents), TOLERANCE)


@given(seed=seeds)
def test_tree_scan_reads_ancestors_only(seed):
    """Huge values off a node's path do not change its output, bit for bit."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    mask = masks_of(parents)
    x, dt, a, B, C, D, h0 = scan_inputs(rng, SHAPE)
    before = np.asarray(jit_tree_scan(x, dt, a, B, C, D, h0, mask))
    node = rng.integers(SHAPE.T)
    for b in range(SHAPE.batch):
        off = ~mask[b, node]
        x[b, off], B[b, off] = 1e15, -1e15
        dt[b, off], a[b, off] = 1e3, -1e5
    after = np.asarray(jit_tree_scan(x, dt, a, B, C, D, h0, mask))
    np.testing.assert_array_equal(after[:, node], before[:, node])


def test_tree_scan_keeps_accuracy_down_a_long_chain():
    """Differences of plain prefix sums would cancel; those of split sums must not."""
    T = 64
    rng = np.random.default_rng(0)
    x, dt, _, B, C, D, h0 = scan_inputs(rng, Shape(1, T, 1, 1, 4, 8))
    a = -rng.uniform(1, 13, dt.shape).astype(np.float32)
    parents = chain(T)[None]
    exact = scan_tree(x, dt, a, B, C, D, h0, parents)

    total = np.cumsum(a[0, :, 0], dtype=np.float32)
    difference = (total[:, None] - total[None]).astype(np.float64)
    weight = np.exp(np.where(mask_of(parents[0]), difference, -np.inf))
    weight *= dt[0, :, 0] * (C[0, :, 0].astype(np.float64) @ B[0, :, 0].T)
    carried = np.exp(total)[:, None] * (C[0, :, 0] @ h0[0, 0].T)
    unsplit = weight @ x[0, :, 0] + carried + D[0] * x[0, :, 0]

    def error(y):
        return np.abs(np.asarray(y, np.float64) - exact[0, :, 0]).max()

    y = jit_tree_scan(x, dt, a, B, C, D, h0, masks_of(parents))
    assert_near(y, exact, 4e-7)
    assert error(y[0, :, 0]) < error(unsplit) / 3


@pytest.mark.parametrize("strong", [0.0, -5.0, -80.0, -5000.0])
def test_tree_scan_keeps_accuracy_past_strong_decays(strong):
    """Strong decays of a few tokens must not reduce the accuracy of later small
    ones."""
    T = 64
    rng = np.random.default_rng(0)
    x, dt, _, B, C, D, h0 = scan_inputs(rng, Shape(1, T, 1, 1, 4, 8))
    a = -rng.uniform(0.01, 0.1, dt.shape).astype(np.float32)
    a[:, ::4] += np.float32(strong)
    parents = chain(T)[None]
    y = jit_tree_scan(x, dt, a, B, C, D, h0, masks_of(parents))
    assert_near(y, scan_tree(x, dt, a, B, C, D, h0, parents), 4e-7)


@pytest.mark.parametrize("decay", [-20.0, -60.0, -85.0, -200.0])
def test_tree_scan_decays_as_far_as_float32_goes(decay):
    """exp(-85) of a state near 1e36 still matters; exp(-200) is 0."""
    x, dt, a, B, C, D, h0 = scan_inputs(np.random.default_rng(0), SHAPES["one token"])
    a[:] = decay
    h0 *= np.float32(1e36)
    y = jit_tree_scan(x, dt, a, B, C, D, h0, np.ones((2, 1, 1), bool))
    expected = scan_tree(x, dt, a, B, C, D, h0, np.full((2, 1), -1))
    assert_near(y, expected, TOLERANCE)


def test_tree_scan_of_bfloat16_equals_float32_of_the_same_values():
    rng = np.random.default_rng(2)
    x, dt, a, B, C, D, h0 = map(jnp.asarray, scan_inputs(rng, SHAPE))
    mask = masks_of(random_parents(rng, SHAPE.batch, SHAPE.T))
    x, B, C = (z.astype(jnp.bfloat16) for z in (x, B, C))
    y = jit_tree_scan(x, dt, a, B, C, D, h0, mask)
    assert y.dtype == jnp.float32
    x, B, C = (z.astype(jnp.float32) for z in (x, B, C))
    assert_near(y, jit_tree_scan(x, dt, a, B, C, D, h0, mask), 1e-6)


# Gradients


def plain_scan(x, dt, a, B, C, D, h0, parents):
    """Computes one sequence node by node, in the inputs' dtype; keeps all states."""
    T, H, P = x.shape
    B, C = (jnp.repeat(z, H // z.shape[1], axis=1) for z in (B, C))

    def step(states, inputs):
        t, parent, x, dt, a, B, C = inputs
        h = jnp.exp(a)[:, None, None] * states[parent]  # h0 is kept last
        h = h + dt[:, None, None] * x[:, :, None] * B[:, None]
        y = (h * C[:, None]).sum(-1) + D.reshape(H, -1) * x
        return states.at[t].set(h), y

    states = jnp.concatenate([jnp.zeros((T, *h0.shape), h0.dtype), h0[None]])
    parents = jnp.where(parents < 0, T, parents)
    return jax.lax.scan(step, states, (jnp.arange(T), parents, x, dt, a, B, C))[1]


def gradients(scan, inputs, cotangent):
    y, pull_back = jax.vjp(scan, *inputs)
    return pull_back(cotangent.astype(y.dtype))


def plain_gradients(inputs, cotangent, parents):
    with jax.enable_x64(True):
        axes = (0, 0, 0, 0, 0, None, 0, 0)
        inputs = [jnp.asarray(z, jnp.float64) for z in inputs]

        def scan(*inputs):
            return jax.vmap(plain_scan, axes)(*inputs, jnp.asarray(parents))

        return [
            np.asarray(g)
            for g in jax.jit(gradients, static_argnums=0)(
                scan, inputs, jnp.asarray(cotangent, jnp.float64)
            )
        ]


NAMES = ["x", "dt", "a", "B", "C", "D", "h0"]


@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_gradient_of_tree_scan(extreme, eager):
    rng = np.random.default_rng(3)
    parents = np.stack([star(SHAPE.T), binary(SHAPE.T)])
    mask = jnp.asarray(masks_of(parents))
    inputs = [jnp.asarray(z) for z in scan_inputs(rng, SHAPE, extreme)]
    cotangent = jnp.asarray(normal(rng, *inputs[0].shape))

    def run(*args):
        return gradients(lambda *z: of_arrays(tree_scan)(*z, mask), args[:-1], args[-1])

    found = (run if eager else jax.jit(run))(*inputs, cotangent)
    expected = plain_gradients(inputs, cotangent, parents)
    for name, f, e in zip(NAMES, found, expected, strict=True):
        assert np.isfinite(f).all(), name
        assert_near(f, e, 3 * TOLERANCE)


@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
def test_gradient_of_chunk_scan(extreme):
    rng = np.random.default_rng(4)
    inputs = [jnp.asarray(z) for z in scan_inputs(rng, SHAPE, extreme)]
    cotangent = jnp.asarray(normal(rng, *inputs[0].shape))

    @jax.jit
    def run(*args):
        return gradients(
            lambda *z: of_arrays(chunk_scan)(*z, chunk=4), args[:-1], args[-1]
        )

    found = run(*inputs, cotangent)
    parents = np.broadcast_to(chain(SHAPE.T), (SHAPE.batch, SHAPE.T))
    expected = plain_gradients(inputs, cotangent, parents)
    for name, f, e in zip(NAMES, found, expected, strict=True):
        assert np.isfinite(f).all(), name
        assert_near(f, e, 3 * TOLERANCE)


# replay


@all_shapes
@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
@given(seed=seeds)
def test_replay_computes_the_recurrence_along_the_path(shape, extreme, seed):
    rng = np.random.default_rng(seed)
    x, dt, a, B, _, _, h0 = scan_inputs(rng, shape, extreme)
    path, length = random_paths(rng, shape.batch, shape.T, min(shape.T, 4))
    h = jit_replay(h0, Replayed(x, dt, a, B, path, length))
    assert h.dtype == jnp.float32
    expected = [
        step_path(h0[b], x[b], dt[b], a[b], B[b], path[b, : length[b]])
        for b in range(shape.batch)
    ]
    assert_near(h, np.stack(expected), TOLERANCE)


@given(seed=seeds)
def test_replay_ignores_the_rest_of_the_path(seed):
    """Huge values past the length have no effect; length 0 returns h0."""
    rng = np.random.default_rng(seed)
    x, dt, a, B, _, _, h0 = scan_inputs(rng, SHAPE)
    path, length = random_paths(rng, SHAPE.batch, SHAPE.T, 4)
    length[0] = 0
    before = np.asarray(jit_replay(h0, Replayed(x, dt, a, B, path, length)))
    for b in range(SHAPE.batch):
        rest = np.setdiff1d(np.arange(SHAPE.T), path[b, : length[b]])
        x[b, rest], B[b, rest], dt[b, rest], a[b, rest] = 1e15, -1e15, 1e3, -1e5
    after = np.asarray(jit_replay(h0, Replayed(x, dt, a, B, path, length)))
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(after[0], h0[0])


@given(seed=seeds)
def test_replay_tree_scan_is_replay_then_tree_scan(seed):
    rng = np.random.default_rng(seed)
    x, dt, a, B, C, D, _ = scan_inputs(rng, SHAPE)
    before = SHAPE._replace(T=6)
    x0, dt0, a0, B0, _, _, h0 = scan_inputs(rng, before)
    path, length = random_paths(rng, before.batch, before.T, 4)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    past = Replayed(x0, dt0, a0, B0, path, length)
    inputs = ScanInputs(x, dt, a, B, C, D)
    y, h = jit_replay_tree_scan(h0, past, inputs, masks_of(parents))
    expected = [
        step_path(h0[b], x0[b], dt0[b], a0[b], B0[b], path[b, : length[b]])
        for b in range(SHAPE.batch)
    ]
    assert_near(h, np.stack(expected), TOLERANCE)
    assert_near(y, scan_tree(*inputs, h, parents), TOLERANCE)


@pytest.mark.parametrize("T, chunk", [(11, 4), (8, 4), (3, 8), (5, 1)])
@given(seed=seeds)
@example(seed=0)
def test_chunk_scan_is_the_causal_tree_scan(T, chunk, seed):
    rng = np.random.default_rng(seed)
    shape = SHAPE._replace(T=T)
    parents = np.broadcast_to(chain(T), (shape.batch, T))
    inputs = scan_inputs(rng, shape)
    y = jit_chunk_scan(*inputs, chunk=chunk)
    assert_near(y, scan_tree(*inputs, parents), TOLERANCE)
    assert_near(y, jit_tree_scan(*inputs, masks_of(parents)), TOLERANCE)


def test_chunk_scan_of_extreme_steps():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        shape = SHAPE._replace(T=11)
        inputs = scan_inputs(rng, shape, extreme=True)
        parents = np.broadcast_to(chain(11), (shape.batch, 11))
        y = jit_chunk_scan(*inputs, chunk=4)
        assert_near(y, scan_tree(*inputs, parents), TOLERANCE)


# tree_conv


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
@given(seed=seeds, empty=st.booleans())
def test_tree_conv_along_each_path(taps, bias, seed, empty):
    rng = np.random.default_rng(seed)
    batch, T, channels = 2, 7, 3
    parents = random_parents(rng, batch, T)
    u, weight = normal(rng, batch, T, channels), normal(rng, channels, taps)
    window0 = normal(rng, batch, taps - 1, channels)
    window0 = np.zeros_like(window0) if empty else window0
    bias = normal(rng, channels) if bias else None
    window = np.stack([window_of(row, taps) for row in parents]).astype(np.int32)
    y = jit_tree_conv(u, weight, bias, window0, window)
    assert y.dtype == jnp.float32
    assert_near(y, conv_tree(u, weight, bias, window0, parents), TOLERANCE)


def test_tree_conv_of_some_rows():
    rng = np.random.default_rng(0)
    parents = random_parents(rng, 2, 7)
    u, weight = normal(rng, 2, 7, 3), normal(rng, 3, 4)
    window0, rows = normal(rng, 2, 3, 3), np.array([5, 0, 6])
    window = np.stack([window_of(row, 4) for row in parents]).astype(np.int32)
    y = jit_tree_conv(u, weight, None, window0, window[:, rows])
    expected = conv_tree(u, weight, None, window0, parents)[:, rows]
    assert_near(y, expected, TOLERANCE)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_commit_window_keeps_the_last_inputs(taps):
    rng = np.random.default_rng(taps)
    T, M, channels = 7, 4, 3
    for length in range(M + 1):
        path, lengths = random_paths(rng, 2, T, M)
        lengths[0] = length
        u = normal(rng, 2, T, channels)
        window0 = normal(rng, 2, taps - 1, channels)
        window = jit_commit_window(window0, u, path, lengths)
        assert window.shape == window0.shape and window.dtype == window0.dtype
        for b in range(2):
            seen = [*window0[b], *(u[b, s] for s in path[b, : lengths[b]])]
            expected = seen[len(seen) - (taps - 1) :]
            np.testing.assert_array_equal(window[b], np.reshape(expected, (-1, 3)))


# tree_attention


def attention_inputs(rng, batch=2, T=5, Hq=4, Hk=2, hd=6, S=7):
    q = normal(rng, batch, T, Hq, hd)
    k, v = normal(rng, batch, T, Hk, hd), normal(rng, batch, T, Hk, hd)
    k_cache, v_cache = normal(rng, batch, Hk, S, hd), normal(rng, batch, Hk, S, hd)
    length = rng.integers(0, S + 1, batch).astype(np.int32)
    length[rng.integers(batch)] = rng.choice([0, S])
    return q, k, v, k_cache, v_cache, length


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@given(seed=seeds, scale=st.sampled_from([0.4, 50.0]))
def test_tree_attention_computes_softmax_over_the_path(heads, seed, scale):
    """Garbage past the committed length and off the path changes nothing."""
    rng = np.random.default_rng(seed)
    q, k, v, k_cache, v_cache, length = attention_inputs(rng, Hq=heads[0], Hk=heads[1])
    for b, n in enumerate(length):
        k_cache[b, :, n:], v_cache[b, :, n:] = 1e30, -1e30
    mask = masks_of(random_parents(rng, *q.shape[:2]))
    inputs = q, k, v, k_cache, v_cache, length, mask
    y = jit_tree_attention(*inputs, np.float32(scale))
    assert y.dtype == jnp.float32
    assert_near(y, attend_tree(*inputs, np.float32(scale)), 10 * scale * TOLERANCE)

    node = rng.integers(q.shape[1])
    for b in range(len(length)):
        k[b, ~mask[b, node]], v[b, ~mask[b, node]] = 1e30, -1e30
    again = jit_tree_attention(*inputs, np.float32(scale))
    np.testing.assert_array_equal(again[:, node], y[:, node])


def test_tree_attention_of_some_rows():
    rng = np.random.default_rng(0)
    q, k, v, k_cache, v_cache, length = attention_inputs(rng)
    rows = np.array([4, 1])
    mask = masks_of(random_parents(rng, *q.shape[:2]))[:, rows]
    inputs = q[:, rows], k, v, k_cache, v_cache, length, mask
    y = jit_tree_attention(*inputs, np.float32(0.4))
    assert_near(y, attend_tree(*inputs, 0.4), 10 * TOLERANCE)


def test_tree_attention_of_a_bfloat16_cache():
    rng = np.random.default_rng(1)
    *arrays, length = attention_inputs(rng)
    arrays = [jnp.asarray(z, jnp.bfloat16) for z in arrays]
    mask = masks_of(random_parents(rng, *arrays[0].shape[:2]))
    y = jit_tree_attention(*arrays, length, mask, np.float32(0.4))
    assert y.dtype == jnp.float32
    expected = attend_tree(*arrays, length, mask, 0.4)
    assert_near(y, expected, OP_TOLERANCE["bfloat16"])


def test_tree_attention_over_several_blocks():
    """The last block of a cache begins earlier; whole blocks give bitwise equal
    results."""
    rng = np.random.default_rng(2)
    *arrays, _ = attention_inputs(rng, S=512)
    length = np.array([290, 129], np.int32)
    mask = masks_of(random_parents(rng, *arrays[0].shape[:2]))

    def attend(S):
        q, k, v, k_cache, v_cache = arrays
        inputs = q, k, v, k_cache[:, :, :S], v_cache[:, :, :S], length, mask
        return jit_tree_attention(*inputs, np.float32(0.4)), attend_tree(*inputs, 0.4)

    for S in (300, 384):
        assert_near(*attend(S), 10 * TOLERANCE)
    np.testing.assert_array_equal(attend(384)[0], attend(512)[0])


# The references against each other


def test_references_agree():
    rng = np.random.default_rng(0)
    parents = random_parents(rng, SHAPE.batch, SHAPE.T)
    inputs = scan_inputs(rng, SHAPE)
    by_path, by_sum = (
        scan_tree(*inputs, parents),
        scan_order(*inputs, masks_of(parents)),
    )
    assert_near(by_path, by_sum, 1e-12)
    assert path_to(binary(7), 5) == [0, 2, 5]
