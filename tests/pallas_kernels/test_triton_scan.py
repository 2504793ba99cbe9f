"""Test the GPU kernel of the scan: results in the interpreter, and lowering for CUDA.

The interpreter accepts shapes and operations that the compiler rejects, so every case
is also lowered for CUDA, which needs no GPU.
"""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from stree_jax.pallas_kernels import Replayed, scan, triton_blocks, triton_scan
from stree_jax.pallas_kernels.triton_blocks import Blocks
from stree_jax.pallas_kernels.triton_scan import unsupported
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    binary,
    chain,
    random_parents,
    random_tree,
    scan_order,
    scan_tree,
    star,
)
from tests.support.scans import (
    Shape,
    definition,
    masks_of,
    of_arrays,
    replay_inputs,
    scan_inputs,
)

TOLERANCE = OP_TOLERANCE["float32"]
CALL = "__gpu$xla.gpu.triton"

CASES = {
    "one token": Shape(2, 1, 2, 1, 16, 16),
    "7 tokens, wide state": Shape(2, 7, 4, 2, 64, 128, True),
    "16 tokens": Shape(1, 16, 4, 1, 64, 128),
    "33 tokens": Shape(2, 33, 4, 2, 16, 16),
    "64 tokens, square state": Shape(1, 64, 4, 1, 64, 64),
    "sizes no powers of two": Shape(1, 20, 3, 3, 48, 80),
}
all_cases = pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

interpreted_replay = partial(triton_scan.replay_tree_scan, interpret=True)
interpreted_scan = partial(triton_scan.tree_scan, interpret=True)
jit_replay = jax.jit(interpreted_replay)
jit_scan = jax.jit(of_arrays(interpreted_scan))


def lower(f, *args):
    """Returns the program for CUDA as text, for no specific GPU."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    specs = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), args)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(f).trace(*specs).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


# The definition


@all_cases
@dtypes
def test_replay_tree_scan_computes_the_recurrence(shape, dtype):
    """Products with a bfloat16 factor are exact, so one tolerance serves both."""
    rng = np.random.default_rng(shape.T)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs = replay_inputs(rng, shape, parents, dtype=dtype)
    y, h = jit_replay(*inputs)
    assert y.dtype == h.dtype == jnp.float32
    expected_y, expected_h = definition(inputs, parents)
    assert_near(h, expected_h, TOLERANCE)
    assert_near(y, expected_y, TOLERANCE)


@all_cases
def test_lowers_for_cuda(shape):
    rng = np.random.default_rng(0)
    parents = random_parents(rng, shape.batch, shape.T)
    for dtype in ("float32", "bfloat16"):
        inputs = replay_inputs(rng, shape, parents, dtype=dtype)
        text = lower(triton_scan.replay_tree_scan, *inputs)
        assert text.count(CALL) == 1
        h0, _, tree, mask = inputs
        assert CALL in lower(triton_scan.tree_scan, tree, h0, mask)
        rows = np.arange(min(shape.T, 3), dtype=np.int32)
        tree = tree._replace(C=tree.C[:, rows])
        assert CALL in lower(triton_scan.tree_scan, tree, h0, mask, rows)


@pytest.mark.parametrize("tree", [chain, star, binary, random_tree])
def test_trees_with_extreme_steps(tree):
    rng = np.random.default_rng(5)
    shape = Shape(2, 13, 4, 2, 16, 32)
    kind = partial(tree, rng) if tree is random_tree else tree
    parents = np.stack([kind(shape.T)] * shape.batch)
    inputs = replay_inputs(rng, shape, parents, extreme=True)
    y, h = jit_replay(*inputs)
    expected_y, expected_h = definition(inputs, parents)
    assert_near(h, expected_h, TOLERANCE)
    assert_near(y, expected_y, TOLERANCE)


@pytest.mark.parametrize("tree", [star, binary])
def test_weights_are_masked_before_exp(tree):
    """Without jit, because XLA:CPU turns 0 * inf into a select, which hides the bug."""
    rng = np.random.default_rng(1)
    T = 9
    mask = masks_of(tree(T)[None])[0]
    dt, a = rng.uniform(0, 50, T).astype(np.float32), np.full(T, -100, np.float32)
    tile = jnp.asarray(np.pad(mask, (0, 16 - T), mode="edge").astype(np.int8))
    pad = (jnp.asarray(np.pad(z, (0, 16 - T), mode="edge")) for z in (a, dt))
    with jax.disable_jit():
        grown, weight = triton_blocks.weights(tile, tile, *pad, T)
    total = mask @ a.astype(np.float64)
    decay = np.exp(np.where(mask, total[:, None] - total, -np.inf))
    assert_near(weight[:T, :T], decay * dt, TOLERANCE)
    np.testing.assert_array_equal(weight[:, T:], 0.0)
    assert_near(grown[:T], np.exp(total), TOLERANCE)


@pytest.mark.parametrize("strong", [0.0, -5.0, -80.0, -5000.0])
def test_keeps_accuracy_past_strong_decays(strong):
    """Strong decays of a few tokens must not reduce the accuracy of later small
    ones."""
    rng = np.random.default_rng(0)
    shape = Shape(1, 64, 1, 1, 16, 16)
    x, dt, a, B, C, D, h0 = scan_inputs(rng, shape)
    a = -rng.uniform(0.01, 0.1, a.shape).astype(np.float32)
    a[:, ::4] += np.float32(strong)
    parents = chain(shape.T)[None]
    y = jit_scan(x, dt, a, B, C, D, h0, masks_of(parents))
    assert_near(y, scan_tree(x, dt, a, B, C, D, h0, parents), 4e-7)


@dtypes
def test_tree_scan_of_some_rows(dtype):
    rng = np.random.default_rng(2)
    shape = Shape(2, 33, 4, 2, 32, 16)
    parents = random_parents(rng, shape.batch, shape.T)
    x, dt, a, B, C, D, h0 = scan_inputs(rng, shape)
    rows = rng.permutation(shape.T)[:5].astype(np.int32)
    x, B, C = (jnp.asarray(z, dtype) for z in (x, B, C))
    y = jit_scan(x, dt, a, B, C[:, rows], D, h0, masks_of(parents), rows)
    x, B, C = map(np.asarray, (x, B, C))
    expected = scan_tree(x, dt, a, B, C[:, rows], D, h0, parents, rows)
    assert_near(y, expected, TOLERANCE)


def test_tree_scan_of_any_partial_order():
    rng = np.random.default_rng(3)
    shape = Shape(1, 9, 2, 1, 16, 16)
    shuffle = rng.permutation(shape.T)
    mask = masks_of(random_parents(rng, 1, shape.T))[:, shuffle][:, :, shuffle]
    inputs = scan_inputs(rng, shape)
    y = jit_scan(*inputs, mask)
    assert_near(y, scan_order(*inputs, mask), TOLERANCE)


def test_the_length_of_the_path():
    """Length 0 returns h0 bit for bit; rows past the length have no effect."""
    rng = np.random.default_rng(4)
    shape = Shape(3, 7, 2, 1, 16, 32)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs = replay_inputs(rng, shape, parents)
    h0, past = inputs[:2]
    path, length = past.path, past.length
    length[:] = 0, 3, path.shape[1]
    before = jit_replay(*inputs)
    for b in range(shape.batch):
        rest = np.setdiff1d(np.arange(past.dt.shape[1]), path[b, : length[b]])
        past.dt[b, rest], past.a[b, rest] = 1e3, -1e5
        path[b, length[b] :] = 10**6
    after = jit_replay(*inputs)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    np.testing.assert_array_equal(after[1][0], h0[0])
    assert_near(after[1], definition(inputs, parents)[1], TOLERANCE)


def test_reads_ancestors_only():
    """Huge values off a node's path do not change its output, bit for bit."""
    rng = np.random.default_rng(6)
    shape = Shape(2, 21, 2, 2, 16, 16)
    parents = random_parents(rng, shape.batch, shape.T)
    mask = masks_of(parents)
    x, dt, a, B, C, D, h0 = scan_inputs(rng, shape)
    before = np.asarray(jit_scan(x, dt, a, B, C, D, h0, mask))
    node = 11
    for b in range(shape.batch):
        off = ~mask[b, node]
        x[b, off], B[b, off] = 1e15, -1e15
        dt[b, off], a[b, off] = 1e3, -1e5
    after = np.asarray(jit_scan(x, dt, a, B, C, D, h0, mask))
    np.testing.assert_array_equal(after[:, node], before[:, node])


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
    rng = np.random.default_rng(7)
    shape = Shape(1, 5, 2, 1, 32, 64)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs = replay_inputs(rng, shape, parents, dtype=dtype)
    y, h = jax.jit(partial(interpreted_replay, blocks=blocks))(*inputs)
    expected_y, expected_h = definition(inputs, parents)
    assert_near(h, expected_h, TOLERANCE)
    assert_near(y, expected_y, TOLERANCE)
    cut = partial(triton_scan.replay_tree_scan, blocks=blocks)
    assert CALL in lower(cut, *inputs)


# Inside other programs

SMALL = Shape(2, 5, 2, 1, 16, 16)


def small_inputs(seed=0):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SMALL.batch, SMALL.T)
    return jax.tree.map(jnp.asarray, replay_inputs(rng, SMALL, parents, T0=SMALL.T))


def near(actual, expected):
    for f, e in zip(actual, expected, strict=True):
        assert_near(f, e, TOLERANCE)


def test_under_vmap():
    """Over all arguments, or over all but the state."""
    each = [small_inputs(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *z: jnp.stack(z), *each)
    expected = jax.jit(jax.vmap(scan.replay_tree_scan))(*stacked)
    near(jax.jit(jax.vmap(interpreted_replay))(*stacked), expected)
    assert CALL in lower(jax.vmap(triton_scan.replay_tree_scan), *stacked)

    axes = (None, 0, 0, 0)
    shared = (each[0][0], *stacked[1:])
    expected = jax.jit(jax.vmap(scan.replay_tree_scan, axes))(*shared)
    near(jax.jit(jax.vmap(interpreted_replay, axes))(*shared), expected)


def test_in_a_while_loop():
    h0, past, tree, mask = small_inputs()

    def run(op, h0, past):
        def step(carry):
            i, h, past, total = carry
            y, h = op(h, past, tree, mask)
            return i + 1, h, Replayed(*tree[:4], *past[4:]), total + y

        carry = jnp.int32(0), h0, past, jnp.zeros_like(tree.x)
        _, h, _, total = jax.lax.while_loop(lambda c: c[0] < 3, step, carry)
        return total, h

    expected = jax.jit(partial(run, scan.replay_tree_scan))(h0, past)
    near(jax.jit(partial(run, interpreted_replay))(h0, past), expected)
    assert CALL in lower(partial(run, triton_scan.replay_tree_scan), h0, past)


def test_chosen_by_platform():
    def run(*args):
        return jax.lax.platform_dependent(
            *args, cpu=scan.replay_tree_scan, cuda=triton_scan.replay_tree_scan
        )

    inputs = small_inputs()
    near(jax.jit(run)(*inputs), jax.jit(scan.replay_tree_scan)(*inputs))
    assert CALL in lower(run, *inputs)


def test_the_state_is_updated_in_place():
    text = lower(triton_scan.replay_tree_scan, *small_inputs())
    call = next(line for line in text.splitlines() if CALL in line)
    alias = "output_tuple_indices = [0], operand_index = 0, operand_tuple_indices = []"
    assert f"output_operand_alias<{alias}>" in call


def test_export_for_cuda():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    allow = jax.export.DisabledSafetyCheck.custom_call(CALL)
    export = jax.export.export(
        jax.jit(triton_scan.replay_tree_scan),
        platforms=["cuda"],
        disabled_checks=[allow],
    )
    inputs = small_inputs()
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = export(*inputs)
    assert CALL in exported.mlir_module()
    assert [z.shape for z in exported.out_avals] == [inputs[2].x.shape, inputs[0].shape]


# Unsupported arguments


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def reason(T=8, P=64, N=128, x=jnp.bfloat16, B=jnp.bfloat16, M=5):
    return unsupported(
        spec(1, T, 4, P, dtype=x),
        spec(1, T, 1, N, dtype=B),
        spec(1, T, T, dtype=jnp.bool_),
        spec(1, M, dtype=jnp.int32),
    )


def test_unsupported():
    assert reason() is None
    assert reason(T=1, P=16, N=16, x=jnp.float32) is None
    assert reason(T=65) == "65 tokens are more than 64"
    assert reason(M=65) == "a path of 65 tokens is longer than 64"
    assert reason(P=8) == "the head size 8 is not a multiple of 16"
    assert reason(N=24) == "the state size 24 is not a multiple of 16"
    assert reason(x=jnp.float16) == "x is float16, neither float32 nor bfloat16"
    assert reason(B=jnp.int8) == "B is int8, neither float32 nor bfloat16"


def test_a_jax_without_the_backend():
    """Importing works without warnings."""
    code = (
        "import sys; sys.modules['jax.experimental.pallas.triton'] = None\n"
        "import numpy\n"
        "from stree_jax.pallas_kernels import triton_scan\n"
        "print(triton_scan.unsupported(*[numpy.zeros((1, 1, 16, 16))] * 3))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "this jax has no Triton backend of Pallas"
