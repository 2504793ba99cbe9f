"""Test that a token whose embedding is NaN changes nothing that does not depend on it.

Such a token is padding, or a draft that is rejected. Results elsewhere must equal those
with an ordinary token in its place, bit for bit: in prefill, over a tree, in other rows
of the batch, and in the state after an accepted path.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import (
    Pending,
    commit,
    extend,
    forward_hidden,
    init_state,
    param_dtype,
    tree_nodes,
)
from tests.models.configs import CONFIGS
from tests.support.families import random_model
from tests.support.native import INSTRUCTIONS, use
from tests.support.reference import mask_of

PARENTS = np.asarray(
    [[-1, 0, 0, 1, 1, 2, 2, 5, 3], [-1, 0, 1, 1, 0, 4, 4, 2, -2]], np.int32
)
LENGTH, PLACE = 70, 37  # a chunk and some more; a place within the chunk
PATHS = jnp.asarray([[0, 2, 6], [0, 4, 0]], jnp.int32), jnp.asarray([3, 2], jnp.int32)
# Nodes with the bad token: siblings and cousins of the path, and padding.
REJECTED = (1, 5), (1, 8)
LEVELS = ["off", *([] if INSTRUCTIONS is None else [""])]


def bad_token(config):
    """Returns a token that no text has."""
    return config.vocab_size - 1


@cache
def broken_model(name):
    model = random_model(CONFIGS[name], 0)
    embedding = model.params["embedding"].at[bad_token(model.config)].set(jnp.nan)
    return model.replace(params=model.params | {"embedding": embedding})


@jax.jit
def read(model, tokens):
    state = init_state(model.config, 2, LENGTH + 20, param_dtype(model.params))
    return extend(model, state, tokens, jnp.full((2,), LENGTH, jnp.int32))


@jax.jit
def two_trees(model, state, first, second):
    """Runs a tree, accepts a path of it, runs another tree and accepts a path."""
    nodes = tree_nodes(jnp.asarray(PARENTS), model.config.conv_taps, has_padding=True)
    one, records, state = forward_hidden(model, state, first, nodes)
    pending = Pending(records, *PATHS)
    args = model, state, second, nodes
    other, records, between = forward_hidden(*args, pending=pending)
    return one, other, between, commit(between, records, *PATHS)


def draw(config, seed, *shape):
    rng = np.random.default_rng(seed)
    return rng.integers(0, bad_token(config), shape).astype(np.int32)


def assert_same(found, wanted):
    assert np.isfinite(np.asarray(wanted, np.float32)).all()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_without_numbers_reaches_only_its_descendants(name, level, monkeypatch):
    use(monkeypatch, level)
    model = broken_model(name)
    bad, text = bad_token(model.config), draw(model.config, 0, 2, LENGTH)
    broken = text.copy()
    broken[0, PLACE] = bad
    wanted, state = read(model, text)
    found, _ = read(model, broken)
    assert_same(found[0, :PLACE], wanted[0, :PLACE])
    assert_same(found[1], wanted[1])
    assert np.isnan(found[0, PLACE:]).all()

    trees = [draw(model.config, seed, 2, 9) for seed in (1, 2)]
    broken = [z.copy() for z in trees]
    for z in broken:
        for b, nodes in enumerate(REJECTED):
            z[b, list(nodes)] = bad
    *wanted, between, after = two_trees(model, state, *trees)
    *found, then, at_end = two_trees(model, state, *broken)
    for b, nodes in enumerate(REJECTED):
        hit = mask_of(PARENTS[b])[:, list(nodes)].any(axis=1)
        free = ~hit & (PARENTS[b] >= -1)
        for one, before in zip(found, wanted, strict=True):
            assert_same(one[b][free], before[b][free])
            assert np.isnan(one[b][hit & (PARENTS[b] >= -1)]).all()
    jax.tree.map(assert_same, then, between)
    jax.tree.map(assert_same, at_end, after)


@pytest.mark.parametrize("level", LEVELS)
def test_padding_of_prompts_is_an_ordinary_token(level, monkeypatch):
    """The whole state is finite, even cache rows past the text."""
    use(monkeypatch, level)
    model = broken_model("mamba2 hybrid")
    tokens, length = draw(model.config, 0, 2, 8), jnp.asarray([8, 3], jnp.int32)
    state = init_state(model.config, 2, 16, param_dtype(model.params))
    run = jax.jit(extend)
    wanted = run(model, state, tokens, length)[1]
    tokens[1, 3:] = bad_token(model.config)
    jax.tree.map(assert_same, run(model, state, tokens, length)[1], wanted)
