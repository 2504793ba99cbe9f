"""Test the walk of tokens through an automaton against its definition."""

import numpy as np
import pytest

from stree_jax import cpu_kernels
from stree_jax.constraints.token_tables import _hashes, _Walk
from stree_jax.cpu_kernels.library import VARIABLE

pytestmark = pytest.mark.skipif(
    cpu_kernels.level() is None, reason="the kernels are not built"
)


def random_pieces(rng, kinds, count):
    """Returns sorted pieces, many with a common beginning."""
    pieces = {bytes(rng.integers(0, kinds, rng.integers(1, 4))) for _ in range(count)}
    for piece in list(pieces):
        end = bytes(rng.integers(0, kinds, rng.integers(0, 5)))
        pieces |= {piece + end, piece[:1]}
    return sorted(pieces)


@pytest.mark.parametrize("allowed", [0.2, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("kinds", [1, 3, 40])
def test_the_definition(monkeypatch, kinds, allowed):
    rng = np.random.default_rng(kinds)
    steps = rng.integers(0, 30, (30, kinds)).astype(np.int32)
    steps[rng.random(steps.shape) > allowed] = -1
    walk = _Walk(random_pieces(rng, kinds, 60))
    ends = np.append(walk.starts, len(walk.data))
    found = _hashes(steps, walk)
    assert cpu_kernels.token_walk(steps, walk.data, ends) is not None
    monkeypatch.setenv(VARIABLE, "off")
    assert cpu_kernels.token_walk(steps, walk.data, ends) is None
    expected = _hashes(steps, walk)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (expected[1] > 0).any()


def test_no_pieces():
    hashes, counts = cpu_kernels.token_walk(
        np.zeros((2, 1), np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int64)
    )
    assert hashes.shape == (0,) and counts.tolist() == [0, 0]
