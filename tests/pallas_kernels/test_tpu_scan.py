"""Test the TPU kernel of the scan: results in the interpreter, and lowering for TPUs.

`make tpu-check` compiles it, which needs libtpu.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from stree_jax.cpu_kernels import kernel
from stree_jax.pallas_kernels import ops, scan, tpu_scan
from stree_jax.pallas_kernels.tpu_limits import heads_of_block, tpu_scan_unsupported
from tests.support.lowering import lowered
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    binary,
    chain,
    random_parents,
    star,
)
from tests.support.scans import Shape, definition, replay_inputs

TOLERANCE = OP_TOLERANCE["float32"]
CALL = "tpu_custom_call"
CASES = {
    "2 tokens": (Shape(1, 2, 2, 1, 64, 128), "float32"),
    "7 tokens, groups, D by channel": (Shape(2, 7, 4, 2, 64, 128, True), "float32"),
    "the same in bfloat16": (Shape(2, 7, 4, 2, 64, 128, True), "bfloat16"),
    "16 tokens, small heads": (Shape(1, 16, 8, 1, 32, 128), "bfloat16"),
    "33 tokens, wide heads": (Shape(1, 33, 2, 2, 128, 256), "float32"),
}

simulated = partial(tpu_scan.replay_tree_scan, interpret=pltpu.InterpretParams())
interpreted = partial(tpu_scan.replay_tree_scan, interpret=True)


def inputs_of(shape, seed=0, parents=None, **options):
    rng = np.random.default_rng(seed)
    if parents is None:
        parents = random_parents(rng, shape.batch, shape.T)
    return replay_inputs(rng, shape, parents, **options), parents


def assert_equal_to_the_definition(found, inputs, parents):
    for ours, expected in zip(found, definition(inputs, parents), strict=True):
        assert ours.dtype == jnp.float32
        assert_near(ours, expected, TOLERANCE)


@pytest.mark.parametrize("shape, dtype", CASES.values(), ids=CASES)
def test_computes_the_recurrence(shape, dtype):
    """Products with a bfloat16 factor are exact, so one tolerance serves both."""
    inputs, parents = inputs_of(shape, dtype=dtype)
    assert tpu_scan_unsupported(*inputs[1:]) is None
    assert_equal_to_the_definition(jax.jit(interpreted)(*inputs), inputs, parents)


def test_in_a_simulated_tpu():
    """With the memories and copies of a TPU, and programs in any order."""
    inputs, parents = inputs_of(Shape(2, 5, 4, 2, 64, 128), dtype="bfloat16")
    assert_equal_to_the_definition(simulated(*inputs), inputs, parents)


@pytest.mark.parametrize("tree", [chain, star, binary])
def test_trees_with_extreme_steps(tree):
    shape = Shape(2, 13, 4, 2, 64, 128)
    parents = np.stack([tree(shape.T)] * shape.batch)
    inputs, _ = inputs_of(shape, 5, parents, extreme=True)
    assert_equal_to_the_definition(jax.jit(interpreted)(*inputs), inputs, parents)


MISTAKES = {
    "a sum over ancestors without its low part": (
        "_split",
        lambda a: (scan.exact_split(a[None])[0][0], jnp.zeros_like(a)),
    ),
    "one bfloat16 part of a float32 factor": (
        "_parts",
        lambda z: [z.astype(jnp.bfloat16)],
    ),
    "heads counted from the first in every program": (
        "pl",
        SimpleNamespace(**vars(tpu_scan.pl) | {"program_id": lambda _: 0}),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name, monkeypatch):
    inputs, parents = inputs_of(Shape(1, 9, 4, 2, 64, 128), dtype="bfloat16")
    monkeypatch.setattr(tpu_scan, *MISTAKES[name])
    with pytest.raises(AssertionError):
        assert_equal_to_the_definition(jax.jit(interpreted)(*inputs), inputs, parents)


def test_the_length_of_the_path():
    """Length 0 returns h0 bit for bit; NaN off the path has no effect."""
    shape = Shape(3, 4, 2, 1, 64, 128)
    (h0, past, *tree), parents = inputs_of(shape, 4, T0=8)
    past.length[:] = 0, 3, past.path.shape[1]
    for b, length in enumerate(past.length):
        rest = np.setdiff1d(np.arange(8), past.path[b, :length])
        past.dt[b, rest], past.a[b, rest] = np.nan, np.inf
        past.path[b, length:] = 10**6
    x, B = (z.at[0].set(jnp.nan) for z in (past.x, past.B))
    faulty = past._replace(x=x, B=B)
    found = jax.jit(interpreted)(h0, faulty, *tree)
    assert_equal_to_the_definition(found, (h0, past, *tree), parents)
    np.testing.assert_array_equal(found[1][0], h0[0])


# Which programs have the kernel

INPUTS, _ = inputs_of(Shape(2, 5, 4, 1, 64, 128), T0=6)


def test_programs_for_tpus_have_the_kernel():
    for platform, found in (("tpu", True), ("cpu", False), ("cuda", False)):
        assert (CALL in lowered(ops.replay_tree_scan, INPUTS, platform)) == found
    plain = partial(ops.replay_tree_scan, implementation="xla")
    assert CALL not in lowered(plain, INPUTS, "tpu")
    stacked = jax.tree.map(lambda z: jnp.stack([z, z]), INPUTS)
    assert CALL in lowered(jax.vmap(ops.replay_tree_scan), stacked, "tpu")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_program_that_jax_divides_has_the_definition(devices):
    choice = kernel._ByPlatform(min, (("cpu", abs), ("tpu", max)))
    module = SimpleNamespace(axis_context=SimpleNamespace(num_devices=devices))
    assert choice.chosen("tpu", module) is (max if devices == 1 else min)
    assert choice.chosen("cpu", module) is abs


def test_the_state_is_updated_in_place():
    text = lowered(tpu_scan.replay_tree_scan, INPUTS, "tpu")
    call = next(line for line in text.splitlines() if CALL in line)
    alias = "output_tuple_indices = [0], operand_index = 2, operand_tuple_indices = []"
    assert f"output_operand_alias<{alias}>" in call


def with_sizes(T=5, heads=4, groups=1, P=64, N=128, dtype=jnp.float32, T0=6):
    shapes = jax.eval_shape(
        lambda: inputs_of(Shape(1, T, heads, groups, P, N), T0=T0, dtype=dtype)[0]
    )
    return tpu_scan_unsupported(*shapes[1:])


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({}, None),
        ({"T": 1}, "a tree of 1 tokens, not of 2 to 64"),
        ({"T": 65}, "a tree of 65 tokens"),
        ({"T0": 70}, "a last tree of 70 tokens"),
        ({"N": 64}, "the state size 64 is not a multiple of 128"),
        ({"P": 48}, "heads of 48 channels, neither a divisor nor a multiple of 128"),
        (
            {"heads": 3, "groups": 3},
            "no part of 1 heads of 64 channels fills 128 lanes",
        ),
        ({"dtype": "float16"}, "x is float16, neither float32 nor bfloat16"),
    ],
)
def test_says_what_it_does_not_support(sizes, reason):
    found = with_sizes(**sizes)
    assert found is None if reason is None else reason in found


def test_a_block_has_as_many_heads_as_fit():
    assert heads_of_block(80, 64, 128) == 20  # Mamba2-2.7B
    assert heads_of_block(24, 64, 128) == 24
    assert heads_of_block(8, 128, 4096) is None  # a head alone is too large
    assert heads_of_block(3, 64, 128) is None
