"""Test the Mosaic GPU kernel: results in the interpreter, and lowering for CUDA.

Only a GPU can run it. The interpreter simulates shared memory, copies and barriers
with NaN where nothing was written, and looks for races between them.
"""

import importlib
import os
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import Replayed, ScanInputs, mosaic_scan
from tests.support.reference import (
    assert_near,
    chain,
    mask_of,
    random_forest,
    random_tree,
    scan_tree,
    star,
    step_path,
)

plgpu = mosaic_scan.plgpu
if plgpu is None:
    pytest.skip(f"jax {jax.__version__}: no Mosaic GPU", allow_module_level=True)
INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret."

# Largest error, relative to the largest value. float32 goes through the matmul in
# three bfloat16 parts; with bfloat16 inputs, the state has two.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-5}


class Shape(NamedTuple):
    T: int
    P: int
    N: int
    dtype: str = "float32"
    groups: int = 1
    heads: int = 2
    batch: int = 1


def interpreter():
    """Returns the interpreter's parameters (private before jax 0.11) with race
    detection."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    params = importlib.import_module(INTERPRETER + "params")
    return params.InterpretGPUParams(detect_races=True)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def tree_inputs(rng, s: Shape, T):
    """Returns (x, dt, a, B, C) of T tokens."""
    A = -np.exp(rng.uniform(np.log(0.05), np.log(16), s.heads)).astype(np.float32)
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(2), (s.batch, T, s.heads)))
    dt = dt.astype(np.float32)
    x = normal(rng, s.batch, T, s.heads, s.P)
    B, C = (normal(rng, s.batch, T, s.groups, s.N) for _ in range(2))
    x, B, C = (jnp.asarray(z, s.dtype) for z in (x, B, C))
    return x, dt, dt * A, B, C


def inputs_of(s: Shape, parents, length, D_per_channel=False, M=4, seed=0):
    """Returns the arguments of `replay_tree_scan` for parents [batch, T]."""
    rng = np.random.default_rng(seed)
    *replayed, _ = tree_inputs(rng, s, 9)
    path = np.stack([rng.permutation(9)[:M] for _ in range(s.batch)]).astype(np.int32)
    length = np.broadcast_to(np.int32(length), s.batch)
    x, dt, a, B, C = tree_inputs(rng, s, s.T)
    D = normal(rng, s.heads, s.P) if D_per_channel else normal(rng, s.heads)
    h0 = normal(rng, s.batch, s.heads, s.P, s.N)
    mask = np.stack([mask_of(row) for row in parents])
    past = Replayed(*replayed, path, length)
    return h0, past, ScanInputs(x, dt, a, B, C, D), mask


def interpreted(inputs):
    run = jax.jit(lambda *z: mosaic_scan.replay_tree_scan(*z, interpret=interpreter()))
    y, h = jax.block_until_ready(run(*inputs))
    races = importlib.import_module(INTERPRETER + "interpret_pallas_call").get_races()
    assert not races.races_found
    assert y.dtype == h.dtype == jnp.float32
    return np.asarray(y), np.asarray(h)


def check(s: Shape, parents, length, **kw):
    parents = np.broadcast_to(parents, (s.batch, s.T))
    inputs = inputs_of(s, parents, length, **kw)
    h0, (*replayed, path, lengths), tree, mask = inputs
    assert mosaic_scan.unsupported(tree.x, tree.B, mask, path) is None
    y, h = interpreted(inputs)
    expected = np.stack(
        [
            step_path(h0[b], *(z[b] for z in replayed), path[b, : lengths[b]])
            for b in range(s.batch)
        ]
    )
    assert_near(h, expected, 1e-6)
    tolerance = TOLERANCE[s.dtype]
    assert_near(y, scan_tree(*tree, expected, parents), tolerance)
    return inputs, y, h


SHAPES = {
    "one token": Shape(1, 64, 64),
    "16 tokens": Shape(16, 64, 128),
    "16 tokens, bfloat16": Shape(16, 64, 128, "bfloat16"),
    "a group per head": Shape(16, 64, 64, "bfloat16", groups=2),
    "two sequences": Shape(13, 64, 64, heads=1, batch=2),
    "64 tokens": Shape(64, 64, 128),
    "64 tokens, bfloat16": Shape(64, 64, 128, "bfloat16", heads=1),
    "large head": Shape(16, 128, 128, heads=1),
    "large state": Shape(16, 64, 256, heads=1),
    "large state, bfloat16": Shape(64, 64, 256, "bfloat16", heads=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_random_tree(shape):
    check(shape, random_tree(np.random.default_rng(shape.T), shape.T), length=3)


@pytest.mark.parametrize("T", [5, 64])
@pytest.mark.parametrize("tree", [chain, star], ids=["chain", "star"])
def test_chain_and_star(tree, T):
    check(Shape(T, 64, 64, heads=1), tree(T), length=2, D_per_channel=True)


@pytest.mark.parametrize("length", [0, 4])
def test_path_lengths(length):
    """Length 0 returns h0; only the valid entries of a path are read."""
    s = Shape(6, 64, 64, heads=1)
    parents = random_forest(np.random.default_rng(length), s.T)
    inputs, y, h = check(s, parents, length)
    h0, (x, dt, a, B, path, lengths), *rest = inputs
    if length == 0:
        np.testing.assert_array_equal(h, h0)
    unread = np.setdiff1d(np.arange(9), path[0, :length])
    x, B = x.at[:, unread].set(np.nan), B.at[:, unread].set(np.nan)
    dt[:, unread], a[:, unread] = np.nan, np.inf
    path[:, length:] = 99  # out of range
    again = interpreted((h0, Replayed(x, dt, a, B, path, lengths), *rest))
    np.testing.assert_array_equal(again[0], y)
    np.testing.assert_array_equal(again[1], h)


@pytest.mark.parametrize("name", ["x", "dt", "a", "B"])
def test_a_token_without_numbers_reaches_only_its_descendants(name):
    s = Shape(6, 64, 64, heads=1)
    parents = np.asarray([[-1, 0, 0, 1, 2, 2]])
    h0, past, tree, mask = inputs_of(s, parents, 2)
    wanted = interpreted((h0, past, tree, mask))
    broken = jnp.asarray(getattr(tree, name)).at[0, 2].set(jnp.nan)
    y, h = interpreted((h0, past, tree._replace(**{name: broken}), mask))
    hit = mask[0, :, 2]
    assert hit.tolist() == [False, False, True, False, True, True]
    np.testing.assert_array_equal(y[0][~hit], wanted[0][0][~hit])
    np.testing.assert_array_equal(h, wanted[1])
    assert np.isnan(y[0][hit]).all()


def test_float32_in_two_parts_if_three_do_not_fit():
    s = Shape(64, 64, 256, heads=1)
    inputs = inputs_of(s, chain(64)[None], 3)
    _, past, tree, mask = inputs
    assert mosaic_scan.unsupported(tree.x, tree.B, mask, past.path) is None
    y, h = interpreted(inputs)
    assert_near(y, scan_tree(*tree, h, chain(64)[None]), 3e-5)


def test_strong_decays_cost_no_accuracy():
    """Path sums to -5000 do not overflow, and decays after a strong one stay exact."""
    s = Shape(64, 64, 64, heads=1)
    h0, past, tree, mask = inputs_of(s, chain(64)[None], 1)
    a = np.random.default_rng(0).uniform(-0.1, -0.01, (1, 64, 1)).astype(np.float32)
    a[:, ::4] -= 80
    tree = tree._replace(a=a)
    y, h = interpreted((h0, past, tree, mask))
    assert_near(y, scan_tree(*tree, h, chain(64)[None]), 1e-6)


def test_overflowing_decays_off_the_path_have_no_effect():
    """Without jit, because XLA:CPU turns 0 * inf into a select."""
    dt = np.ones((1, 8, 1), np.float32)
    a = -np.linspace(0, 120, 8, dtype=np.float32).reshape(dt.shape)
    with jax.disable_jit():
        decay = mosaic_scan._decays(dt, a, jnp.asarray(mask_of(star(8))[None]), 16)
    assert np.isfinite(decay).all()


# CUDA


CUDA_CASES = {
    "Mamba2": Shape(16, 64, 128, "bfloat16", heads=80),
    "Mamba2, float32": Shape(64, 64, 128, heads=24),
    "small state, 8 groups": Shape(32, 64, 64, "bfloat16", groups=8, heads=8),
    "large state": Shape(64, 64, 256, "bfloat16", heads=8),
    "large head": Shape(16, 128, 128, "bfloat16", heads=8),
}


@pytest.mark.parametrize("shape", CUDA_CASES.values(), ids=CUDA_CASES)
def test_lowers_to_one_mosaic_call(shape):
    inputs = inputs_of(shape, chain(shape.T)[None], 1, M=16)
    run = jax.jit(mosaic_scan.replay_tree_scan)
    text = run.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


def test_no_temporary_of_the_states_size():
    """Arrays that XLA prepares grow with T^2 and M, not with the state."""
    s = Shape(16, 64, 256, "bfloat16", heads=32)
    inputs = inputs_of(s, chain(16)[None], 1)
    jaxpr = jax.make_jaxpr(mosaic_scan.replay_tree_scan)(*inputs)
    sizes = [
        np.prod(v.aval.shape, dtype=int)
        for eqn in jaxpr.jaxpr.eqns
        for v in eqn.outvars
        if eqn.primitive.name not in ("mpmd_map", "custom_vmap_call", "core_map")
    ]
    assert max(sizes) < inputs[0].size


# Unsupported arguments


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "T, P, N, M, dtype, reason",
    [
        (16, 64, 128, 16, "float32", None),
        (64, 128, 256, 16, "bfloat16", None),
        (65, 64, 128, 4, "float32", "65 tokens, more than 64"),
        (16, 32, 128, 4, "float32", "head size 32, not 64 or 128"),
        (16, 64, 16, 4, "bfloat16", "state size 16, not 64, 128 or 256"),
        (16, 64, 128, 4, "float16", "float16, .* not float32 or bfloat16"),
        (64, 64, 256, 64, "float32", "up to 64 tokens, .* too much shared memory"),
    ],
)
def test_unsupported(T, P, N, M, dtype, reason):
    x, B = spec(1, T, 4, P, dtype=dtype), spec(1, T, 1, N, dtype=dtype)
    mask, path = spec(1, T, T, dtype=bool), spec(1, M, dtype=jnp.int32)
    found = mosaic_scan.unsupported(x, B, mask, path)
    assert (found is None) if reason is None else re.search(reason, found)


def test_without_mosaic(monkeypatch):
    monkeypatch.setattr(mosaic_scan, "plgpu", None)
    x, B = spec(1, 16, 4, 64), spec(1, 16, 1, 128)
    found = mosaic_scan.unsupported(x, B, spec(1, 16, 16), spec(1, 4))
    assert found == f"jax {jax.__version__} without Mosaic GPU"


def test_import_without_mosaic_and_without_warnings():
    code = """
import sys
sys.modules["jax.experimental.pallas.mosaic_gpu"] = None
from stree_jax.pallas_kernels import Replayed, ScanInputs, mosaic_scan
assert mosaic_scan.plgpu is None
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for lines in (code, "import stree_jax.pallas_kernels.mosaic_scan"):
        command = [sys.executable, "-W", "error", "-c", lines]
        subprocess.run(command, check=True, env=env)
