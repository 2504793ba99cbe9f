"""Test the training of EAGLE-3 drafters: levels below many roots, and the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.models import (
    chain_nodes,
    extend,
    forward_hidden,
    init_state,
    logits_of,
    tree_nodes,
)
from stree_jax.models.drafters.eagle import eagle_model, project
from stree_jax.models.drafters.heads import head_of
from stree_jax.training import eagle as training
from stree_jax.training.tapped_drafters import DECAY
from tests.support import eagle

M, T = 3, 12
PLACES = ((1, 4, 5), (2, 7, 9))
WINDOW = dict(layer_types=["sliding_attention"] * 2, sliding_window=4)
CASES = {  # arguments of `eagle.tensors`, and fields of the config
    "plain": ({}, {}),
    "window, two layers": (dict(layers=2), WINDOW),
    "normed output": (
        dict(extra=["fc_norm"], layers=2),
        dict(fc_norm=True, norm_output=True, norm_before_residual=True),
    ),
}


@pytest.fixture(scope="module")
def target():
    return eagle.target()


def batch_of(rng):
    """Returns a batch of random states and tokens."""
    shape = len(PLACES), T, 1 + len(eagle.BOUNDARIES), eagle.D
    return {
        "states": jnp.asarray(rng.standard_normal(shape), jnp.float32),
        "tokens": jnp.asarray(rng.integers(0, eagle.REAL, shape[:2]), jnp.int32),
        "places": jnp.asarray(PLACES, jnp.int32),
    }


@pytest.mark.parametrize("case", CASES)
def test_all_drafts_of_a_text_are_as_drafted_one_by_one(target, case):
    """Each draft sees the pairs up to its root and the drafts above it, as in
    decoding."""
    arguments, fields = CASES[case]
    tensors = eagle.tensors(target, **arguments)
    drafter = read_eagle(eagle.config(**fields), tensors, target.config)
    model, batch = eagle_model(drafter, target), batch_of(np.random.default_rng(0))
    hidden = training.handed_down(model, batch, M)

    @jax.jit
    def one_by_one(states, text, place):
        """Returns the vectors of the drafts below a root."""
        streams = jnp.moveaxis(states[None, :-1, 1:], 2, 0)
        u, length = project(model, tuple(streams)), place[None]
        state = init_state(model.config, 1, T + M, jnp.float32)
        read, state = extend(model, state, text[None, 1:], length, previous=u)
        found = [read[:, place - 1][:, None]]
        for k in range(1, M):
            handed = jnp.concatenate(found, axis=1)
            tokens = jax.lax.dynamic_slice(text, [place + 1], [k])[None]
            nodes = chain_nodes(1, k, model.config.conv_taps)
            read, *_ = forward_hidden(model, state, tokens, nodes, previous=handed)
            found.append(read[:, -1:])
        return jnp.concatenate(found, axis=1)

    for b, a in np.ndindex(2, 3):
        one = batch["states"][b], batch["tokens"][b], batch["places"][b, a]
        along = one_by_one(*one)
        np.testing.assert_allclose(hidden[b, a], along[0], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(
            logits_of(model, hidden[b, a][None]),
            logits_of(model, along),
            atol=1e-4,
            rtol=1e-5,
        )


def test_the_levels_are_chains_below_their_roots():
    parents = np.full((2, 11 + 6), -1)
    parents[:, 1:11] = np.arange(10)
    for b, places in enumerate(PLACES):
        parents[b, 11:14], parents[b, 14:] = np.array(places) - 1, np.arange(11, 14)
    wanted = tree_nodes(jnp.asarray(parents, jnp.int32), 1)
    found = training.level_nodes(jnp.asarray(PLACES, jnp.int32), 11, 2)
    np.testing.assert_array_equal(found.mask, wanted.mask)
    np.testing.assert_array_equal(found.depth, wanted.depth)
    np.testing.assert_array_equal(found.window, wanted.window)


def test_the_loss_is_that_of_its_definition(target):
    """Draft k is compared with the target's state at the root's place + k."""
    tensors = eagle.tensors(target)
    del tensors["d2t"], tensors["t2d"], tensors["lm_head.weight"]
    config = eagle.config(draft_vocab_size=None)
    drafter, out = read_eagle(config, tensors, target.config), head_of(target)
    batch = batch_of(np.random.default_rng(1))
    subject = training.Levels(drafter.config, M)
    found = subject.loss(drafter.params, batch, out)
    q = subject.log_probs(drafter.params, batch, out)[1]
    p = jax.nn.log_softmax(logits_of(out, batch["states"][:, :, 0])[..., : eagle.REAL])
    total, weight = 0.0, np.exp(-np.arange(M) / DECAY)
    for n, (b, a) in enumerate(np.ndindex(2, 3)):
        for k in range(M):
            at = np.exp(np.asarray(p[b, PLACES[b][a] + k], np.float64))
            own = np.exp(np.asarray(q[n, k], np.float64))
            loss = (at * np.log(at / own)).sum() + 1 - np.minimum(at, own).sum()
            total += weight[k] * loss / 6
    np.testing.assert_allclose(found, total / weight.sum(), rtol=1e-4)
