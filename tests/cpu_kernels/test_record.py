"""Test that the kernels record a step's tokens as JAX does."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.decoding import OPEN, Output, _cut_by_tokens, _recorded
from tests.support.native import assert_same, built, in_place

pytestmark = built
ROWS, WIDTH, STOPS = 64, 5, 3


@pytest.fixture(params=range(3))
def rng(request):
    return np.random.default_rng(request.param)


def test_accepted_tokens_are_cut(rng, both):
    """Rows at their limit, with stop tokens before and after it, and finished rows."""
    tokens = rng.integers(0, 9, (ROWS, WIDTH))
    stops = rng.integers(-1, 9, (ROWS, STOPS))
    before = rng.integers(0, 20, ROWS)
    limit = before + rng.integers(0, WIDTH + 2, ROWS)
    rest = rng.integers(1, WIDTH + 1, ROWS), before, rng.integers(0, 4, ROWS), limit
    arrays = [jnp.asarray(z, jnp.int32) for z in (tokens, *rest, stops)]
    ours, wanted = both(_cut_by_tokens, *arrays)
    length, finish = ours
    assert {0, 1, 2, 3} == set(np.asarray(finish).tolist())
    assert 0 < int((length > 0).sum()) < ROWS
    assert_same(ours, wanted)


@pytest.mark.parametrize("choice", [0, 2, OPEN])
@pytest.mark.parametrize("nodes", [1, 7])
def test_tokens_are_recorded(choice, nodes, rng, both):
    """Also with full outputs, with different trees per row, and with rows that gain no
    tokens."""
    room, trees = 12, 3

    def ints(most, *shape):
        return jnp.asarray(rng.integers(0, most, shape), jnp.int32)

    count = ints(WIDTH + 1, ROWS).at[0].set(0)
    before = Output(
        ints(99, ROWS, room),
        ints(5, ROWS, room).astype(jnp.uint8),
        ints(99, ROWS),
        jnp.minimum(ints(room + 1, ROWS), room - count + (count > 3).astype(jnp.int32)),
        ints(9, ROWS, trees),
        ints(9, ROWS, WIDTH + 1),
        jnp.asarray(rng.standard_normal(ROWS), jnp.float32).at[1].set(jnp.inf),
    )
    step = (
        jnp.full((ROWS,), choice, jnp.int32).at[::3].set(1),
        ints(2, ROWS) > 0,
        Accepted(
            path=ints(nodes, ROWS, WIDTH),
            length=count,
            tokens=ints(99, ROWS, WIDTH),
            margin=jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32),
        ),
        ints(5, ROWS, nodes).astype(jnp.uint8),
    )
    assert in_place(_recorded, before, *step) == len(before)
    assert_same(*both(_recorded, before, *step))
