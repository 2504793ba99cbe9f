"""Test kernels on a GPU against float64, and decoding against plain decoding.

`make gpu-test` runs these. Without a GPU they are skipped; STREE_INTERPRET=1 tries the
tests themselves on a CPU, by the kernels' interpreters.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models import cast_params
from stree_jax.models.weights.int8 import quantize, rounded
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.panels import KINDS, product, triton
from stree_jax.pallas_kernels import (
    attention,
    mosaic_scan,
    triton_attention,
    triton_delta,
    triton_scan,
)
from tests.support import deltas
from tests.support.chains import logits_of_chain
from tests.support.panel_files import random_blocks
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    attend_tree,
    chain,
    random_parents,
)
from tests.support.scans import Shape, definition, masks_of, normal, replay_inputs
from tests.support.tiny import REAL, tiny

INTERPRET = os.environ.get("STREE_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" and not INTERPRET, reason="wants a GPU"
    ),
]
# bf16x3 and tf32x3 products lose at most 2^-16 of each factor; see the kernels.
TOLERANCE = {"float32": 1e-4, "bfloat16": OP_TOLERANCE["bfloat16"]}
SHAPES = {
    "mamba2": Shape(1, 16, 24, 1, 64, 128),
    "two rows, groups": Shape(2, 33, 16, 8, 64, 128),
    "wide state": Shape(1, 64, 8, 1, 64, 256),
    "square": Shape(2, 7, 8, 8, 128, 128),
}
if INTERPRET:
    SHAPES = {"small": Shape(1, 16, 2, 1, 64, 64)}
SCHEMES = ["q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "iq4_xs", "mxfp4"]
DELTAS = {
    "qwen": deltas.Shape(1, 16, 6, 3, 128, 128),
    "two rows": deltas.Shape(2, 33, 8, 4, 128, 128),
    "wide values": deltas.Shape(1, 64, 4, 4, 192, 96),
    "plain step": deltas.Shape(2, 1, 4, 2, 128, 128),
    "by column": deltas.Shape(2, 16, 4, 4, 128, 128, True),
    "by column, in groups": deltas.Shape(1, 64, 4, 4, 128, 128, True),
}
if INTERPRET:
    DELTAS = {"small": deltas.Shape(1, 16, 2, 1, 32, 32)}
REPEATS = 2 if INTERPRET else 100
SCANS = {"triton": partial(triton_scan.replay_tree_scan, interpret=INTERPRET)}
if not INTERPRET:  # its interpreter takes seconds a head
    SCANS["mosaic_gpu"] = mosaic_scan.replay_tree_scan
scans = pytest.mark.parametrize("kernel", SCANS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def run_scan(kernel, inputs):
    """Returns the kernel's results, or skips the test for unsupported arguments."""
    module = {"triton": triton_scan, "mosaic_gpu": mosaic_scan}[kernel]
    _, past, tree, mask = inputs
    reason = module.unsupported(tree.x, tree.B, mask, past.path)
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")
    return jax.jit(SCANS[kernel])


def poison(size):
    """Fills freed memory with NaN, so that values that are not written show."""
    blocks = [jnp.full((size,), jnp.nan) for _ in range(4)]
    jax.block_until_ready(blocks)


@scans
@dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_scan_computes_the_recurrence(kernel, dtype, shape, seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    inputs = replay_inputs(rng, shape, parents, dtype=dtype, extreme=seed == 2)
    run = run_scan(kernel, inputs)
    poison(1 << 16)
    for got, wanted in zip(run(*inputs), definition(inputs, parents), strict=True):
        assert_near(got, wanted, TOLERANCE[dtype])


@scans
def test_scan_is_reproducible(kernel):
    shape = next(iter(SHAPES.values()))
    rng = np.random.default_rng(5)
    inputs = replay_inputs(rng, shape, random_parents(rng, shape.batch, shape.T))
    run = run_scan(kernel, inputs)
    first = jax.tree.map(np.asarray, run(*inputs))
    for _ in range(REPEATS):
        jax.tree.map(np.testing.assert_array_equal, run(*inputs), first)


run_delta = jax.jit(partial(triton_delta.delta_replay_scan, interpret=INTERPRET))
run_delta_rows = jax.jit(partial(triton_delta.delta_scan, interpret=INTERPRET))


@dtypes
@pytest.mark.parametrize("shape", DELTAS.values(), ids=DELTAS)
@pytest.mark.parametrize("seed", range(3))
def test_delta_rule_computes_the_recurrence(dtype, shape, seed):
    """Products with a bfloat16 factor are exact, so one tolerance serves both."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, shape.batch, shape.T)
    extreme = seed == 2
    h0, past, tree = deltas.replayed_inputs(rng, shape, dtype=dtype, extreme=extreme)
    mask = masks_of(parents)
    poison(1 << 16)
    found = jax.tree.map(np.asarray, run_delta(h0, past, tree, mask))
    h = deltas.delta_path(h0, past)
    y, u, _ = deltas.delta_tree(tree, h, parents)
    for got, wanted in zip(found, (y, u, h), strict=True):
        assert_near(got, wanted, TOLERANCE["float32"])
    for _ in range(REPEATS):
        again = run_delta(h0, past, tree, mask)
        jax.tree.map(np.testing.assert_array_equal, again, found)


@dtypes
@pytest.mark.parametrize("T", [16, 64])
def test_delta_rule_level_by_level(dtype, T):
    """A first group that is a chain, then the rest of a random tree in two groups."""
    rng = np.random.default_rng(T)
    shape = next(iter(DELTAS.values()))._replace(T=T)
    parents = np.array([[-1, 0, 1, *(rng.integers(0, t) for t in range(3, T))]])
    inputs, h0 = deltas.delta_inputs(rng, shape, dtype=dtype)
    y_once, u_once, _ = deltas.delta_tree(inputs, h0, parents)
    u = np.full(u_once.shape, 1e4, np.float32)
    for rows in (np.arange(3), np.arange(3, T // 2), np.arange(T // 2, T)):
        rows = rows.astype(np.int32)
        some = deltas.queries(inputs, rows)
        y, u = run_delta_rows(some, h0, masks_of(parents), rows, u)
        assert_near(y, y_once[:, rows], TOLERANCE["float32"])
    assert_near(u, u_once, TOLERANCE["float32"])


def test_delta_rule_of_equal_keys():
    """Errors of tf32x3 products grow along such a chain, but stay small."""
    inputs, h0 = deltas.equal_keys(64, 2, 16, 16)
    parents = chain(64)[None]
    found = run_delta_rows(inputs, h0, masks_of(parents))
    expected = deltas.delta_tree(inputs, h0, parents)[:2]
    for got, wanted in zip(found, expected, strict=True):
        assert_near(got, wanted, 10 * TOLERANCE["float32"])


@dtypes
@pytest.mark.parametrize(("Hq", "Hk", "S"), [(8, 2, 1000), (4, 4, 37), (32, 8, 5003)])
def test_attention_computes_softmax(dtype, Hq, Hk, S):
    if INTERPRET and S > 1000:
        pytest.skip("slow to interpret")
    rng = np.random.default_rng(S)
    T, hd = 16, 64
    parents = random_parents(rng, 2, T)
    q, k, v = (normal(rng, 2, T, heads, hd) for heads in (Hq, Hk, Hk))
    k_cache, v_cache = normal(rng, 2, Hk, S, hd), normal(rng, 2, Hk, S, hd)
    args = [jnp.asarray(z, dtype) for z in (q, k, v, k_cache, v_cache)]
    length, mask = np.array([S - 7, S // 3], np.int32), masks_of(parents)
    run = jax.jit(partial(triton_attention.tree_attention, interpret=INTERPRET))
    poison(1 << 16)
    got = run(*args, length, mask, 0.125)
    exact = [np.asarray(z, np.float64) for z in args]
    assert_near(got, attend_tree(*exact, length, mask, 0.125), TOLERANCE[dtype])
    for _ in range(REPEATS):
        np.testing.assert_array_equal(run(*args, length, mask, 0.125), got)


@dtypes
def test_attention_through_a_window(dtype):
    """And with sinks: the definition."""
    rng = np.random.default_rng(0)
    T, Hq, Hk, S, hd = 16, 8, 2, 300 if INTERPRET else 3000, 64
    q, k, v = (normal(rng, 2, T, heads, hd) for heads in (Hq, Hk, Hk))
    caches = normal(rng, 2, Hk, S, hd), normal(rng, 2, Hk, S, hd)
    args = [jnp.asarray(z, dtype) for z in (q, k, v, *caches)]
    length, mask = (
        np.array([S - 7, S // 3], np.int32),
        masks_of(random_parents(rng, 2, T)),
    )
    first = np.stack([np.arange(T) * 3 + S // 2, np.full(T, S // 3 + 2)])
    sink = jnp.linspace(-2.0, 3.0, Hq)
    rest = length, mask, 0.125, jnp.asarray(first, jnp.int32), sink
    run = jax.jit(partial(triton_attention.tree_attention, interpret=INTERPRET))
    exact = [jnp.asarray(z, jnp.float32) for z in args]
    wanted = attention.tree_attention(*exact, *rest)
    assert_near(run(*args, *rest), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize(("m", "k"), [(50, 32), (132, 64)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_int8_products_are_exact(rows, m, k):
    """XLA's own int8 products gave wrong sums for two rows on an H200."""
    rng = np.random.default_rng(rows)
    x, weight = normal(rng, rows, k), quantize(jnp.asarray(normal(rng, m, k)))
    q, scale = (np.asarray(z, np.float64) for z in rounded(jnp.asarray(x), 1))
    w, by_row = (np.asarray(z, np.float64) for z in (weight.q, weight.scale))
    for _ in range(REPEATS):
        got = jax.jit(linear)(x, weight)
        assert_near(got, q @ w.T * scale * by_row.T, 1e-5)


def test_token_by_token_equals_one_pass_in_bfloat16():
    """Except where sums that differ by an ulp are rounded to two neighbours.

    XLA removed roundings in only one of the programs: up to 0.04 in the logits.
    """
    model = tiny(1)
    model = model.replace(params=cast_params(model.config, model.params, jnp.bfloat16))
    rng, agree = np.random.default_rng(0), []
    for _ in range(8):
        text = rng.integers(8, REAL, 16)
        one, many = (logits_of_chain(model, text, T) for T in (1, 16))
        assert_near(one, many, 0.1)
        agree += [np.abs(one - many).max(axis=1) < 1e-4]
    assert np.mean(agree) > 0.5


@pytest.mark.skipif(INTERPRET, reason="plain JAX decodes on a CPU")
@pytest.mark.parametrize("sampling", [None, Sampling(0.8, seed=3)], ids=["greedy", "T"])
def test_the_bundled_pair_decodes_exactly(sampling):
    """float32 output equals plain decoding, except for ties of the logits."""
    target = stree_jax.load("demo", dtype="float32")
    drafter = stree_jax.load("demo-drafter", dtype="float32")
    prompts = ["def fibonacci(n):\n", "import os\n", "for", "A baker has 12 trays"]
    options = dict(max_new_tokens=64, sampling=sampling)
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    fast = stree_jax.generate(target, prompts, drafter=drafter, tree="E", **options)
    for row, (ours, theirs) in enumerate(zip(fast.tokens, plain.tokens, strict=True)):
        assert ours == theirs or plain.min_margin[row] < 1e-3
    assert sum(map(list.__eq__, fast.tokens, plain.tokens)) >= 3
    assert fast.acceptance_length.mean() > 1.5


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES[:2] if INTERPRET else SCHEMES)
def test_products_with_panels(scheme, planes):
    m, k = (48, 256) if INTERPRET else (1040, 1536)
    kind, k = KINDS[scheme], k if scheme != "mxfp4" else 4 * k
    panels = jnp.asarray(kind.pack({"blocks": random_blocks(scheme, m, k)}))
    multiply = partial(triton.panel_product, kind=kind, planes=planes)
    rows = np.random.default_rng(0).standard_normal((64, k)).astype(np.float32)
    whole = multiply(rows, panels, interpret=INTERPRET)
    x, w = product.rounded(jnp.asarray(rows), planes), kind.decode(panels).matrix()
    q = sum(np.float64(256) ** (planes - 1 - i) * z for i, z in enumerate(x.planes))
    q = np.asarray(q, np.float64).reshape(*x.scale.shape, -1)
    exact = (q * np.asarray(x.scale, np.float64)[..., None]).reshape(rows.shape)
    wanted = exact @ np.asarray(w, np.float64).reshape(-1, k).T
    error = np.abs(np.asarray(whole, np.float64) - wanted).max()
    assert error < 2e-6 * np.abs(wanted).max()
    for t in (1, 5, 16, 33):
        y = multiply(rows[:t], panels, interpret=INTERPRET)
        np.testing.assert_array_equal(y, whole[:t])
