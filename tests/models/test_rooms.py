"""A smaller tree in the room of a larger one is that tree, whatever lies behind it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import Pending, forward_hidden, tree_nodes
from stree_jax.models.nodes import NO_NODE
from tests.models.test_state import (
    BATCH,
    T,
    assert_same_state,
    model_of,
    random_accepted,
    random_tokens,
)
from tests.support.native import INSTRUCTIONS, use
from tests.support.reference import MODEL_TOLERANCE, assert_near, random_parents

STRANGE = 30  # a token whose embedding is no number
FEW = 3  # nodes
LEVELS = ["off", *([] if INSTRUCTIONS is None else ["portable", ""])]


def poisoned(params):
    """Parameters with which what reads a strange token is no number."""
    table = params["embedding"]
    return params | {"embedding": table.at[STRANGE].set(jnp.nan)}


def passes(name, dtype):
    """Hidden states, records and state after trees in rooms and after them alone."""
    runner = model_of(name, dtype)
    rng = np.random.default_rng(3)
    start, first = runner.prefix(rng), random_parents(rng, BATCH, T)
    _, records, _ = runner.forward(start, random_tokens(rng), runner.nodes(first))
    pending = Pending(records, *map(jnp.asarray, random_accepted(rng, first)))
    small = random_parents(rng, BATCH, FEW)
    tokens = random_tokens(rng)
    room = np.full((BATCH, T), NO_NODE, np.int32)
    room[:, :FEW] = small
    inside = np.where(room == NO_NODE, STRANGE, tokens)
    taps = runner.config.conv_taps
    model = runner.forward.args[0]
    if name != "two mixers a layer":  # experts mix what their rows are
        model = model.replace(params=poisoned(model.params))

    def run(tokens, parents, *, partly=False):
        nodes = tree_nodes(jnp.asarray(parents), taps, partly=partly)
        run = jax.jit(partial(forward_hidden, model))
        return run(start, jnp.asarray(tokens), nodes, pending=pending)

    return run(inside, room, partly=True), run(tokens[:, :FEW], small)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["mamba2 hybrid", "grouped x heads", "two mixers a layer"]
)
def test_nodes_know_nothing_of_the_room_behind_them(level, dtype, name, monkeypatch):
    if level:
        use(monkeypatch, level)
    (hidden, records, state), (alone, few, after) = passes(name, dtype)
    assert np.isfinite(alone).all()
    tolerance = MODEL_TOLERANCE[dtype]
    assert_near(hidden[:, :FEW], alone, tolerance)
    assert_same_state(state, after, tolerance)
    for mine, other in zip(*map(jax.tree.leaves, (records, few)), strict=True):
        assert_near(mine[:, :FEW], other[:, :FEW], tolerance)


def test_tables_of_what_is_no_node():
    parents = jnp.asarray([[-1, 0, NO_NODE, NO_NODE], [-1, 0, 1, 0]], jnp.int32)
    nodes = tree_nodes(parents, 3, partly=True)
    np.testing.assert_array_equal(nodes.count, [2, 4])
    assert not nodes.mask[0, 2:].any() and not nodes.mask[0, :, 2:].any()
    assert nodes.depth.min() == 0 and 0 <= nodes.window.min() <= nodes.window.max() < 6
