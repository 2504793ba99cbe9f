"""Attention with a sliding window and with sinks: the definition in float64, the loop
over blocks, and the CPU kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import cpu_kernels
from stree_jax.pallas_kernels import tree_attention
from stree_jax.pallas_kernels.attention import in_blocks

B, Tq, T, Hq, Hk, hd, S = 2, 3, 5, 6, 2, 16, 400
LENGTH = np.array([170, 391], np.int32)
MASK = np.tril(np.ones((T, T), bool))[-Tq:][None].repeat(B, 0)


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
@pytest.mark.parametrize("how", ["definition", "blocks", "native"])
def test_a_window_hides_the_rows_before_it(how, sinks, window):
    if how == "native" and not cpu_kernels.available():
        pytest.skip("no kernels")
    arrays = inputs(jnp.float32)
    place = LENGTH[:, None] + np.arange(T - Tq, T)
    first = np.maximum(place - (window - 1), 0).astype(np.int32)
    sink = np.linspace(-2, 3, Hq).astype(np.float32) if sinks else None
    args = *arrays, jnp.asarray(LENGTH), jnp.asarray(MASK), hd**-0.5
    last = jnp.asarray(first), None if sink is None else jnp.asarray(sink)
    if how == "blocks":
        got = in_blocks(*args, *last)
    else:
        named = "xla" if how == "definition" else "native"
        got = tree_attention(*args, *last, implementation=named)
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
