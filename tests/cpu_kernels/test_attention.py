"""Test the compiled attention against float64, and its reproducibility."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import tree_attention
from tests.support.native import built, each_level, use
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    attend_tree,
    mask_of,
    random_parents,
)

pytestmark = built
SCALE = 0.3


class Shape(NamedTuple):
    """Batch rows, nodes, KV heads, queries per KV head, channels, capacity, lengths."""

    batch: int
    T: int
    Hk: int
    G: int
    hd: int
    S: int
    lengths: tuple[int, ...]


SHAPES = {
    "one query": Shape(1, 1, 1, 1, 8, 128, (37,)),
    "few queries": Shape(2, 2, 2, 3, 20, 200, (200, 0)),
    "turned keys": Shape(2, 9, 2, 2, 33, 192, (7, 130)),
    "several tiles": Shape(1, 70, 1, 3, 16, 128, (100,)),
    "latent": Shape(1, 3, 1, 8, 576, 70, (66,)),
    "wide parts": Shape(2, 5, 1, 7, 288, 1200, (1200, 1030)),
    "parts": Shape(2, 5, 1, 2, 4, 2500, (2500, 1030)),
}


def case(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)

    def normal(*size):
        return jnp.asarray(rng.standard_normal(size), jnp.float32).astype(dtype)

    B, T, Hk, G, hd, S, lengths = shape
    parents = random_parents(rng, B, T)
    size = min(1.0, 8 / hd**0.5)  # scores of heads of any size are alike
    return (
        size * normal(B, T, Hk * G, hd).astype(jnp.float32),
        *(normal(B, T, Hk, hd) for _ in range(2)),
        *(normal(B, Hk, S, hd) for _ in range(2)),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(np.stack([mask_of(p) for p in parents])),
    )


def native(*args):
    return tree_attention(*args, SCALE, implementation="native")


@each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_softmax_over_the_path(shape, dtype, level, monkeypatch):
    """Weights stay float32; with a bfloat16 cache only the queries are rounded."""
    use(monkeypatch, level)
    args = case(shape, dtype)
    q = args[0].astype(dtype).astype(jnp.float32)
    wanted = attend_tree(*(np.asarray(z) for z in (q, *args[1:])), SCALE)
    assert_near(jax.jit(native)(*args), wanted, OP_TOLERANCE["float32"])


def test_large_scores_and_fully_masked_rows():
    """The largest score is subtracted first; a query without any key gets zeros."""
    args = case(SHAPES["turned keys"])
    large = args[0] * 1e4, *args[1:]
    wanted = attend_tree(*(np.asarray(z) for z in large), SCALE)
    assert_near(jax.jit(native)(*large), wanted, OP_TOLERANCE["float32"])
    *arrays, length, mask = args
    y = jax.jit(native)(*arrays, length * 0, mask.at[1, 3].set(False))
    assert not np.asarray(y[1, 3]).any() and np.asarray(y[1, 4]).all()


@each_level
@pytest.mark.parametrize("name", ["few queries", "turned keys", "parts", "wide parts"])
def test_results_do_not_depend_on_batch_or_capacity(name, level, monkeypatch):
    """Bitwise equal alone and in a batch, and with a larger cache of any content."""
    use(monkeypatch, level)
    args = case(SHAPES[name], "bfloat16")
    run = jax.jit(native)
    y = run(*args)
    for b in range(2):
        np.testing.assert_array_equal(run(*(z[b : b + 1] for z in args))[0], y[b])
    q, k, v, *caches, length, mask = args
    wider = (
        jnp.pad(z, ((0, 0), (0, 0), (0, 99), (0, 0)), constant_values=7.0)
        for z in caches
    )
    np.testing.assert_array_equal(run(q, k, v, *wider, length, mask), y)


@each_level
def test_results_do_not_depend_on_other_queries(level, monkeypatch):
    """Bitwise equal in a wide tree and in a narrower one with the same visible nodes;
    and with up to six queries (two nodes of three) and with one."""
    use(monkeypatch, level)
    q, k, v, *caches, length, mask = case(SHAPES["several tiles"])
    run = jax.jit(native)
    y = run(q, k, v, *caches, length, mask)
    for T in (7, 33, 65):
        few = (z[:, :T] for z in (q, k, v))
        cut = run(*few, *caches, length, mask[:, :T, :T])
        np.testing.assert_array_equal(cut, y[:, :T])
    two, one = (
        run(*(z[:, :T] for z in (q, k, v)), *caches, length, mask[:, :T, :T])
        for T in (2, 1)
    )
    np.testing.assert_array_equal(one, two[:, :1])


def test_results_do_not_depend_on_threads():
    """Several threads share a long text of one row; for many rows one thread has it."""
    shape = SHAPES["parts"]._replace(batch=1, lengths=(2500,))
    one = case(shape)
    many = tuple(jnp.concatenate([z] * 64) for z in one)
    run = jax.jit(native)
    alone = run(*one)
    for y in run(*many):
        np.testing.assert_array_equal(y, alone[0])


def test_vmap_adds_rows_to_the_batch():
    args = case(SHAPES["few queries"])
    mapped = jax.jit(jax.vmap(lambda q: native(q, *args[1:])))
    q = jnp.stack([args[0], -args[0]])
    np.testing.assert_array_equal(mapped(q)[0], jax.jit(native)(*args))
    np.testing.assert_array_equal(mapped(q)[1], jax.jit(native)(-args[0], *args[1:]))


def test_no_buffer_for_all_scores(optimised):
    """For any length XLA has no temporary, and the kernel one part per thread."""
    shape = Shape(1, 16, 2, 3, 64, 65536, (65536,))
    args = case(shape)
    held = jax.jit(native).lower(*args).compile().memory_analysis()
    assert held.temp_size_in_bytes < 2**16
    assert "stree_attention" in jax.jit(native).lower(*args).as_text()


def test_unsupported_arguments_raise_if_requested_and_use_xla_otherwise():
    *arrays, length, mask = case(SHAPES["few queries"])
    empty = [z[:, :, :0] for z in arrays[3:]]
    args = *arrays[:3], *empty, length * 0, mask
    with pytest.raises(ValueError, match="wants a cache that is not empty"):
        native(*args)
    with pytest.raises(ValueError, match="wants a scale that is a number"):
        jax.jit(lambda s: tree_attention(*args, s, implementation="native"))(0.3)


@each_level
@pytest.mark.parametrize("name", ["one query", "turned keys", "parts", "wide parts"])
def test_nan_is_not_hidden(name, level, monkeypatch):
    """With a query of NaN, and with a cache of NaN keys."""
    use(monkeypatch, level)
    q, k, v, k_cache, *rest = case(SHAPES[name])
    out = np.asarray(jax.jit(native)(q.at[0, 0, 0].set(np.nan), k, v, k_cache, *rest))
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(out).sum() == out.shape[-1]
    lost = jnp.full_like(k_cache, np.nan)
    out = np.asarray(jax.jit(native)(q, k, v, lost, *rest))
    assert np.isnan(out[0]).all()
