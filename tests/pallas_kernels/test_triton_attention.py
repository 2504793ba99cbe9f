"""Test the Triton attention kernel: interpreted against float64, and lowered for CUDA.

Interpreted products are exact float32 and every size is allowed. A kernel that is
right may still not compile for a GPU, so each case is also lowered.
"""

import importlib.util
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stree_jax.pallas_kernels import attention, triton_attention
from stree_jax.pallas_kernels.triton_attention import (
    Blocks,
    default_blocks,
    tree_attention,
    unsupported,
)
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    attend_tree,
    chain,
    mask_of,
    random_parents,
    star,
)

TOLERANCE = OP_TOLERANCE["float32"]
SCALE = 0.3


class Case(NamedTuple):
    T: int = 7
    heads: tuple[int, int] = (4, 2)
    S: int = 50  # a multiple of no block
    blocks: Blocks = Blocks(keys=16, rows=16, splits=1)
    hd: int = 16
    batch: int = 2


CASES = {
    "one token": Case(T=1, heads=(2, 2)),
    "one token, two splits": Case(T=1, blocks=Blocks(16, 16, 2)),
    "one token of one head, more splits than blocks": Case(
        T=1, heads=(1, 1), batch=1, blocks=Blocks(16, 16, 8)
    ),
    "a head each": Case(heads=(2, 2)),
    "four queries a head": Case(heads=(8, 2)),
    "eight queries a head": Case(heads=(8, 1), blocks=Blocks(16, 32, 2)),
    "three queries a head": Case(heads=(6, 2), blocks=Blocks(16, 64, 1)),
    "cache within a block": Case(S=9, blocks=Blocks(32, 16, 1)),
    "cache of whole blocks": Case(S=64, blocks=Blocks(32, 16, 2)),
    "16 nodes in one tile": Case(T=16, blocks=Blocks(16, 32, 1)),
    "33 nodes in three blocks": Case(T=33, blocks=Blocks(16, 64, 2)),
    "33 nodes in one block": Case(T=33, heads=(2, 2), blocks=Blocks(64, 64, 8)),
    "64 nodes in four tiles": Case(T=64, heads=(2, 2), blocks=Blocks(32, 16, 1)),
    "head size 64": Case(hd=64, blocks=Blocks(32, 16, 2)),
    "head size 128": Case(heads=(2, 1), hd=128, blocks=Blocks(32, 16, 1)),
}
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
CASE = CASES["one token, two splits"]._replace(T=7)


def shapes_of(case: Case):
    """Returns the shapes of q, k, v, k_cache and v_cache."""
    (Hq, Hk), rows = case.heads, (case.batch, case.T)
    cache = (case.batch, Hk, case.S, case.hd)
    nodes = (*rows, Hk, case.hd)
    return [(*rows, Hq, case.hd), nodes, nodes, cache, cache]


def draw(rng, case: Case):
    """Returns (q, k, v, k_cache, v_cache), standard normal."""
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes_of(case)]


def masks(rng, case: Case):
    return np.stack([mask_of(p) for p in random_parents(rng, case.batch, case.T)])


def lengths_of(case: Case):
    """Returns batches of lengths, including 0, 1, S and some between."""
    S, keys = case.S, case.blocks.keys
    every = [0, S, 1, S // 2, min(keys, S), S - 1]
    return np.reshape(every, (-1, case.batch)).astype(np.int32)


def poison(cache, length):
    """Returns the cache with NaN past every sequence's length."""
    past = jnp.arange(cache.shape[2])[None] >= length[:, None]
    return jnp.where(past[:, None, :, None], jnp.nan, cache)


def interpreted(case: Case):
    return jax.jit(partial(tree_attention, blocks=case.blocks, interpret=True))


# Values


@all_cases
def test_it_computes_softmax_over_the_path(case):
    """For every length, and any values past it."""
    rng = np.random.default_rng(0)
    q, k, v, k_cache, v_cache = draw(rng, case)
    attend = interpreted(case)
    for length in lengths_of(case):
        mask = masks(rng, case)
        caches = poison(k_cache, length), poison(v_cache, length)
        y = attend(q, k, v, *caches, length, mask, np.float32(SCALE))
        assert y.dtype == jnp.float32
        expected = attend_tree(q, k, v, k_cache, v_cache, length, mask, SCALE)
        assert_near(y, expected, TOLERANCE)


def test_values_off_the_path_have_no_effect():
    """Huge keys and values off a node's path do not change its output, bit for bit."""
    rng = np.random.default_rng(1)
    q, k, v, *caches = draw(rng, CASE)
    length = np.array([0, CASE.S], np.int32)
    mask = np.stack([mask_of(star(CASE.T)), mask_of(chain(CASE.T))])
    attend = interpreted(CASE)
    before = attend(q, k, v, *caches, length, mask, SCALE)
    expected = attend_tree(q, k, v, *caches, length, mask, SCALE)
    assert_near(before, expected, TOLERANCE)
    for node in range(CASE.T):
        off = ~mask[:, node, :, None, None]
        k_off, v_off = jnp.where(off, 1e30, k), jnp.where(off, -1e30, v)
        after = attend(q, k_off, v_off, *caches, length, mask, SCALE)
        np.testing.assert_array_equal(after[:, node], before[:, node])


def test_nodes_that_see_only_themselves():
    """Also after a whole block of masked nodes, with an empty cache."""
    case = CASES["33 nodes in three blocks"]
    q, k, v, *caches = draw(np.random.default_rng(9), case)
    mask = np.broadcast_to(np.eye(case.T, dtype=bool), (case.batch, case.T, case.T))
    length = np.zeros(case.batch, np.int32)
    y = interpreted(case)(q, k, v, *caches, length, mask, np.float32(SCALE))
    np.testing.assert_array_equal(y, jnp.repeat(v, 2, axis=2))


def test_some_rows():
    rng = np.random.default_rng(2)
    q, *arrays = draw(rng, CASE)
    rows = np.array([4, 1])
    mask = masks(rng, CASE)[:, rows]
    inputs = q[:, rows], *arrays, np.array([13, 50], np.int32), mask, SCALE
    y = interpreted(CASE)(*inputs)
    assert_near(y, attend_tree(*inputs), TOLERANCE)


@pytest.mark.parametrize("splits", [1, 8])
def test_large_scores(splits):
    """Scores of a few hundred do not overflow, wherever the largest one is."""
    rng = np.random.default_rng(3)
    q, k, v, k_cache, v_cache = draw(rng, CASE)
    q = q.at[..., 0].set(1.0)
    length = np.array([50, 33], np.int32)
    mask = masks(rng, CASE)
    attend = interpreted(CASE._replace(blocks=Blocks(16, 16, splits)))
    for shift in -40, 0, 40:
        ramp = jnp.linspace(0, shift, CASE.S, dtype=jnp.float32)
        caches = k_cache.at[..., 0].set(ramp[None, None]), v_cache
        inputs = q, k, v, *caches, length, mask, np.float32(10)
        assert_near(attend(*inputs), attend_tree(*inputs), 20 * TOLERANCE)


def test_a_bfloat16_cache():
    """Queries are rounded to the cache's dtype, and so are probabilities."""
    rng = np.random.default_rng(4)
    q, *arrays = draw(rng, CASE)
    arrays = [z.astype(jnp.bfloat16) for z in arrays]
    rounded = q.astype(jnp.bfloat16)
    inputs = *arrays, np.array([0, 50], np.int32), masks(rng, CASE), np.float32(SCALE)
    attend = interpreted(CASE)
    y = attend(q, *inputs)
    assert y.dtype == jnp.float32
    assert_near(y, attend_tree(rounded, *inputs), OP_TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(attend(rounded, *inputs), y)


def test_default_blocks_in_use():
    rng = np.random.default_rng(5)
    case = Case(T=5, S=300, heads=(4, 2), batch=1)
    arrays = draw(rng, case)
    inputs = *arrays, np.array([257], np.int32), masks(rng, case), SCALE
    y = jax.jit(partial(tree_attention, interpret=True))(*inputs)
    assert_near(y, attend_tree(*inputs), TOLERANCE)


# Transformations


def test_vmap():
    """Over all arguments, and over only the mask."""
    rng = np.random.default_rng(6)
    attend = partial(tree_attention, blocks=CASE.blocks, interpret=True)
    arrays = [jnp.stack(z) for z in zip(draw(rng, CASE), draw(rng, CASE), strict=True)]
    length = jnp.array([[0, 50], [7, 20]], jnp.int32)
    mask = jnp.stack([masks(rng, CASE), masks(rng, CASE)])
    y = jax.jit(jax.vmap(lambda *z: attend(*z, SCALE)))(*arrays, length, mask)
    for i in range(2):
        inputs = *(z[i] for z in arrays), length[i], mask[i], SCALE
        assert_near(y[i], attend_tree(*inputs), TOLERANCE)

    one = [z[0] for z in arrays]
    y = jax.jit(jax.vmap(lambda m: attend(*one, length[1], m, SCALE)))(mask)
    for i in range(2):
        assert_near(y[i], attend_tree(*one, length[1], mask[i], SCALE), TOLERANCE)


def test_while_loop():
    """The output of each step is the query of the next, with one more committed
    token."""
    rng = np.random.default_rng(7)
    q, *arrays = draw(rng, CASE)
    length, mask = jnp.array([0, 30], jnp.int32), jnp.asarray(masks(rng, CASE))
    attend = partial(tree_attention, blocks=CASE.blocks, interpret=True)

    @jax.jit
    def run(q, length):
        def step(carry):
            i, q, length = carry
            return i + 1, attend(q, *arrays, length, mask, SCALE), length + 1

        return lax.while_loop(lambda c: c[0] < 3, step, (0, q, length))[1]

    expected = q
    for i in range(3):
        expected = attend_tree(expected, *arrays, length + i, mask, SCALE)
    assert_near(run(q, length), expected, 3 * TOLERANCE)


# Lowering for CUDA


def a_gpu():
    """Returns an H200 to lower for; jax 0.10 assumes one, later versions need it."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def abstract(case: Case, dtype):
    """Returns (q, k, v, k_cache, v_cache, length, mask) without values; q in
    float32."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes_of(case)]
    arrays[0] = jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)
    length = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    return *arrays, length, jax.ShapeDtypeStruct((case.batch, case.T, case.T), bool)


def lower_cuda(f, *args):
    with a_gpu():
        lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def kernels(text):
    return text.count("@__gpu$xla.gpu.triton")


REAL = {
    f"{T} nodes, {heads} heads of {hd}, {S} entries": Case(
        T, heads, S, default_blocks(batch, T, *heads, S, hd, "float32"), hd, batch
    )
    for T, heads, hd, S, batch in [
        (1, (32, 8), 128, 1090, 1),
        (16, (12, 4), 64, 1090, 1),
        (64, (32, 32), 64, 32834, 4),
        (64, (32, 8), 128, 32834, 1),
    ]
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES.values(), *REAL.values()], ids=[*CASES, *REAL])
def test_lowering(case, dtype):
    attend = partial(tree_attention, scale=SCALE, blocks=case.blocks)
    text = lower_cuda(attend, *abstract(case, dtype))
    assert kernels(text) == (1 if case.blocks.splits == 1 else 2)


def test_lowering_under_vmap_and_while_loop():
    args = abstract(CASE, "float32")
    attend = partial(tree_attention, scale=SCALE, blocks=CASE.blocks)
    twice = [jax.ShapeDtypeStruct((2, *z.shape), z.dtype) for z in args]
    assert kernels(lower_cuda(jax.vmap(attend), *twice)) == 2

    def run(q, *rest):
        step = partial(_again, attend, rest)
        return lax.while_loop(lambda q: q[0, 0, 0, 0] < 9.0, step, q)

    assert kernels(lower_cuda(run, *args)) == 2


def _again(attend, rest, q):
    return attend(q, *rest)


def test_dispatch_by_platform():
    """With another implementation for the CPU, and the kernel for the GPU."""

    def attend(*args):
        return lax.platform_dependent(
            *args,
            cpu=partial(attention.tree_attention, scale=SCALE),
            cuda=partial(tree_attention, scale=SCALE, blocks=CASE.blocks),
        )

    assert kernels(lower_cuda(attend, *abstract(CASE, "float32"))) == 2
    rng = np.random.default_rng(8)
    inputs = *draw(rng, CASE), np.array([3, 50], np.int32), masks(rng, CASE)
    assert_near(jax.jit(attend)(*inputs), attend_tree(*inputs, SCALE), TOLERANCE)


def test_export():
    attend = partial(tree_attention, scale=SCALE, blocks=CASE.blocks)
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with a_gpu():
        exported = jax.export.export(
            jax.jit(attend), platforms=["cuda"], disabled_checks=checks
        )(*abstract(CASE, "float32"))
    assert kernels(exported.mlir_module()) == 2


# Blocks and unsupported arguments


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hd", [16, 64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (12, 4), (32, 32), (71, 1)], ids=str)
def test_default_blocks(heads, hd, dtype):
    """Powers of two; splits only for few programs and a long cache."""
    for T in 1, 7, 64, 300:
        for batch, S in (1, 100), (1, 1090), (1, 1 << 17), (64, 1 << 17):
            b = default_blocks(batch, T, *heads, S, hd, dtype)
            for n in b.keys, b.rows, b.splits, b.num_warps:
                assert n & (n - 1) == 0, b
            assert 16 <= b.rows <= 64 and b.keys >= 16
            assert b.splits == 1 or S // b.splits >= 128
            tiles = batch * heads[1] * -(-T * (heads[0] // heads[1]) // b.rows)
            assert b.splits == 1 or tiles * b.splits <= 264
            assert b.splits * tiles > 132 or S // b.splits < 256 or b.splits == 64


def refuse(change=None, q="float32", k="float32", v="float32", **fields):
    q_, _, _, k_, v_, _, mask = abstract(Case(**fields), "float32")
    cast = [jax.ShapeDtypeStruct(z.shape, d) for z, d in ((q_, q), (k_, k), (v_, v))]
    return unsupported(*cast, mask)


def test_supported_and_unsupported_arguments(monkeypatch):
    assert refuse() is None
    assert refuse(k="bfloat16", v="bfloat16") is None
    assert refuse(k="float16", v="float16") == (
        "a cache of float16, neither float32 nor bfloat16"
    )
    assert refuse(v="bfloat16") == "keys of float32 but values of bfloat16"
    for hd in 8, 80, 96, 512:
        assert refuse(hd=hd) == f"head size {hd}, not a power of two from 16 to 256"
    assert refuse(heads=(6, 4)) == "6 query heads do not divide among 4 KV heads"
    assert refuse(S=0) == "an empty cache, batch or tree"
    args = abstract(Case(hd=80), "float32")
    with pytest.raises(NotImplementedError, match="head size 80"):
        jax.eval_shape(lambda *z: tree_attention(*z, SCALE), *args)
    monkeypatch.setattr(triton_attention, "pltriton", None)
    assert refuse() == "this jax has no jax.experimental.pallas.triton"


def test_import_without_triton(monkeypatch):
    """Imports do not warn, with or without Triton."""
    spec = importlib.util.find_spec(triton_attention.__name__)
    assert spec is not None and spec.loader is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        assert module.pltriton is not None
        monkeypatch.delattr("jax.experimental.pallas.triton")
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
        spec.loader.exec_module(module)
    assert module.pltriton is None
    q, _, _, k_cache, v_cache, _, mask = abstract(CASE, "float32")
    assert "pallas.triton" in module.unsupported(q, k_cache, v_cache, mask)
