"""Attention with a sliding window and with sinks: the definition in float64, the loop
over blocks, the CPU kernel, and the GPU kernel in the interpreter."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import cpu_kernels
from stree_jax.pallas_kernels import tree_attention, triton_attention
from stree_jax.pallas_kernels.attention import in_blocks
from stree_jax.pallas_kernels.triton_attention import Blocks
from tests.support.lowering import lowered

B, Tq, T, Hq, Hk, hd, S = 2, 3, 5, 6, 2, 16, 400
LENGTH = np.array([170, 391], np.int32)
MASK = np.tril(np.ones((T, T), bool))[-Tq:][None].repeat(B, 0)

HOW = {
    "definition": partial(tree_attention, implementation="xla"),
    "native": partial(tree_attention, implementation="native"),
    "blocks": in_blocks,
    "triton": partial(
        triton_attention.tree_attention, blocks=Blocks(64, 16, 1), interpret=True
    ),
    "triton, splits": partial(
        triton_attention.tree_attention, blocks=Blocks(32, 16, 4), interpret=True
    ),
}


def inputs(dtype):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    arrays = normal(B, Tq, Hq, hd), *(normal(B, T, Hk, hd) for _ in range(2))
    caches = (normal(B, Hk, S, hd).astype(dtype) for _ in range(2))
    return *arrays, *caches


def exact(q, k, v, k_cache, v_cache, first, sink):
    """Computes every query by itself in float64."""
    out = np.zeros((B, Tq, Hq, hd))
    for b in range(B):
        for t in range(Tq):
            for h in range(Hq):
                g, rows = h // (Hq // Hk), slice(int(first[b, t]), LENGTH[b])
                keys = np.concatenate([k_cache[b, g, rows], k[b, MASK[b, t], g]])
                values = np.concatenate([v_cache[b, g, rows], v[b, MASK[b, t], g]])
                score = keys.astype(np.float64) @ q[b, t, h] * hd**-0.5
                weight = np.exp(score)
                extra = 0.0 if sink is None else np.exp(sink[h])
                out[b, t, h] = weight @ values / (weight.sum() + extra)
    return out


@pytest.mark.parametrize("window", [1, 3, 40, 64, 130, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_a_window_hides_the_rows_before_it(how, sinks, window):
    if how == "native" and not cpu_kernels.available():
        pytest.skip("no kernels")
    arrays = inputs(jnp.float32)
    place = LENGTH[:, None] + np.arange(T - Tq, T)
    first = np.maximum(place - (window - 1), 0).astype(np.int32)
    sink = np.linspace(-2, 3, Hq).astype(np.float32) if sinks else None
    args = *arrays, jnp.asarray(LENGTH), jnp.asarray(MASK), hd**-0.5
    last = jnp.asarray(first), None if sink is None else jnp.asarray(sink)
    got = HOW[how](*args, *last)
    wanted = exact(*map(np.asarray, arrays), np.minimum(first, LENGTH[:, None]), sink)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_query_has_the_same_result_alone(queries):
    """In 16 bits, too, where the kernel reads whole blocks of the cache."""
    q, *rest = inputs(jnp.bfloat16)
    first = jnp.asarray([[100] * Tq, [37] * Tq], jnp.int32)
    sink = jnp.ones(Hq, jnp.float32)

    def run(some):
        args = q[:, some], *rest, jnp.asarray(LENGTH), jnp.asarray(MASK[:, some])
        return tree_attention(*args, hd**-0.5, first[:, some], sink)

    some = slice(Tq - queries, Tq)
    np.testing.assert_allclose(run(some), run(slice(0, Tq))[:, some], atol=1e-6)


@pytest.mark.parametrize("splits", [1, 4])
def test_the_gpu_kernel_does_not_read_rows_that_no_query_sees(splits):
    """Blocks before the window may hold NaN; so may rows past the length."""
    *nodes, k_cache, v_cache = inputs(jnp.float32)
    first = np.array([[130] * Tq, [395, 390, 396]], np.int32)  # some past the length
    place = np.arange(S)
    outside = (place < 96) | (place >= LENGTH[:, None])
    caches = [
        jnp.where(outside[:, None, :, None], jnp.nan, z) for z in (k_cache, v_cache)
    ]
    args = jnp.asarray(LENGTH), jnp.asarray(MASK), hd**-0.5, jnp.asarray(first), None
    run = partial(triton_attention.tree_attention, interpret=True)
    got = run(*nodes, *caches, *args, blocks=Blocks(32, 16, splits))
    arrays = *nodes, k_cache, v_cache
    wanted = exact(*map(np.asarray, arrays), np.minimum(first, LENGTH[:, None]), None)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_program_has_the_kernel(dtype):
    arrays = *inputs(dtype), jnp.asarray(LENGTH), jnp.asarray(MASK)
    first, sink = jnp.zeros((B, Tq), jnp.int32), jnp.ones(Hq, jnp.float32)
    for last in ((first, None), (None, sink), (first, sink)):
        text = lowered(
            lambda *z, last=last: tree_attention(*z, 0.25, *last), arrays, "cuda"
        )
        assert "__gpu$xla.gpu.triton" in text
