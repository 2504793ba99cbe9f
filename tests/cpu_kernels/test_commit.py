"""Test that the kernels write accepted paths to windows and caches as JAX does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.mixers.kv_cache import append_both
from stree_jax.pallas_kernels import commit_window
from tests.support.native import assert_same, built, in_place

pytestmark = built
ROWS, T, M, CHANNELS, HEADS, WIDTH, ROOM = 6, 7, 5, 9, 3, 4, 20
DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.fixture(params=range(2))
def rng(request):
    return np.random.default_rng(request.param)


def numbers(rng, dtype, *shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def paths(rng):
    """Returns paths of every length, including 0 and all entries."""
    path = np.sort(rng.integers(0, T, (ROWS, M)), axis=1)
    length = np.array([0, M, *rng.integers(0, M + 1, ROWS - 2)])
    return jnp.asarray(path, jnp.int32), jnp.asarray(length, jnp.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4, 9])
def test_windows(rng, taps, dtype, both):
    """Windows may be longer than the path."""
    window0 = numbers(rng, dtype, ROWS, taps - 1, CHANNELS)
    u, (path, length) = numbers(rng, dtype, ROWS, T, CHANNELS), paths(rng)
    assert in_place(commit_window, window0, u, path, length) == 1
    assert_same(*both(commit_window, window0, u, path, length))
    unused = jnp.where(jnp.arange(M)[None] < length[:, None], path, 999)
    assert_same(
        jax.jit(commit_window)(window0, u, unused, length),
        jax.jit(commit_window)(window0, u, path, length),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches(rng, dtype, both):
    """The path may begin at any row that leaves enough space."""
    bits = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    shape = ROWS, HEADS, ROOM, WIDTH
    caches = tuple(numbers(rng, dtype, *shape).view(bits) for _ in range(2))
    rows = tuple(numbers(rng, dtype, ROWS, T, HEADS, WIDTH) for _ in range(2))
    path, length = paths(rng)
    start = jnp.asarray([0, ROOM - M, *range(3, ROWS + 1)], jnp.int32)
    assert in_place(append_both, caches, rows, path, start) == 2
    assert_same(*both(append_both, caches, rows, path, start))

    unused = jnp.where(jnp.arange(M)[None] < length[:, None], path, 999)
    for cache, z in zip(
        jax.jit(append_both)(caches, rows, unused, start), rows, strict=True
    ):
        for b in range(ROWS):
            wanted = z[b, path[b, : int(length[b])]].swapaxes(0, 1).view(bits)
            first = int(start[b])
            got = cache[b, :, first : first + int(length[b])]
            np.testing.assert_array_equal(got, wanted)


def test_old_arrays_survive_if_they_are_still_used(rng):
    """Otherwise they are updated in place."""
    window0, u = (numbers(rng, jnp.float32, ROWS, n, CHANNELS) for n in (3, T))
    path, length = paths(rng)
    twice = jax.jit(lambda *z: (commit_window(*z), z[0] + 0))
    new, old = twice(window0, u, path, length)
    np.testing.assert_array_equal(old, window0)
    np.testing.assert_array_equal(new, jax.jit(commit_window)(window0, u, path, length))
    assert not np.array_equal(new, old)


def test_vmap(rng):
    """`jax.vmap` adds rows to one call."""
    window0, u = (numbers(rng, jnp.float32, 2, ROWS, n, CHANNELS) for n in (3, T))
    path, length = paths(rng)
    mapped = jax.jit(jax.vmap(commit_window, (0, 0, None, None)))
    assert mapped.lower(window0, u, path, length).as_text().count("@stree_window") == 1
    for one in range(2):
        wanted = jax.jit(commit_window)(window0[one], u[one], path, length)
        np.testing.assert_array_equal(mapped(window0, u, path, length)[one], wanted)


def test_wrong_shapes_raise(rng):
    """Nothing is written outside an array."""
    cache, start = numbers(rng, jnp.float32, 2, HEADS, ROOM, WIDTH), jnp.zeros(2, int)
    path = jnp.zeros((2, M), jnp.int32)
    for shape in (
        (2, T, HEADS + 1, WIDTH),
        (2, T, HEADS, WIDTH + 1),
        (3, T, HEADS, WIDTH),
    ):
        rows = numbers(rng, jnp.float32, *shape)
        with pytest.raises(Exception, match="heads and head size of the caches"):
            jax.jit(append_both)(
                (cache,) * 2, (rows,) * 2, path, start.astype(jnp.int32)
            )
    window0, u = (numbers(rng, jnp.float32, 2, n, CHANNELS) for n in (3, T))
    with pytest.raises(Exception, match="the window's dtype and channels"):
        jax.jit(commit_window)(window0, u[:, :, 1:], path, path[:, 0])
    with pytest.raises(Exception, match="the window's dtype and channels"):
        jax.jit(commit_window)(window0, u, path[:1], path[:1, 0])
