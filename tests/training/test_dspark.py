"""Test the training of DSpark drafters: blocks and their loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import logits_of
from stree_jax.models.drafters.dflash import (
    DFlashLayer,
    add_context,
    draft_logits,
    empty_context,
    run_block,
)
from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.models.drafters.heads import head_of
from stree_jax.training import dspark as training
from stree_jax.training.tapped_drafters import DECAY
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import REAL, tiny

M = 3


@pytest.fixture(scope="module")
def model():
    return tiny(1, layers=("attention", "mlp"))


def batch_of(drafter, rng, T=12, places=((1, 4, 5), (2, 7, 9))):
    """Returns a batch of random states and tokens."""
    c = drafter.config
    shape = len(places), T, 1 + len(c.boundaries), c.target_width
    return {
        "states": jnp.asarray(rng.standard_normal(shape), jnp.float32),
        "tokens": jnp.asarray(rng.integers(0, REAL, shape[:2]), jnp.int32),
        "places": jnp.asarray(places, jnp.int32),
    }


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn"])
def test_all_blocks_of_a_text_are_as_drafted_one_by_one(model, kind):
    """Each block sees the context rows before its root and none after, within the
    window; scores are those of drafting along the text."""
    layers = (DFlashLayer(6), DFlashLayer(0, True))
    options = KINDS[kind] | dict(slots=M, from_root=True, layers=layers)
    drafter = random_dflash(model, **options)
    batch = batch_of(drafter, np.random.default_rng(0))
    tokens, places, taps = batch["tokens"], batch["places"], batch["states"][:, :, 1:]
    roots = jnp.take_along_axis(tokens, places, axis=1)
    hidden = training.block_states(drafter, head_of(model), taps, roots, places)
    every = jnp.arange(drafter.config.vocab_size, dtype=jnp.int32)[None]

    @jax.jit
    def one_by_one(taps, text, place):
        """Returns the states and the logits of a block, drafted along the text."""
        rows = tuple(taps[None, :, i] for i in range(taps.shape[1]))
        context = empty_context(drafter, 1, 16, jnp.float32)
        context = add_context(drafter, context, rows, place[None])
        states = run_block(drafter, head_of(model), context, text[place][None], M)
        logits = draft_logits(drafter, head_of(model), states)
        memory, found = no_memory(drafter, (1, 1)), []
        for k in range(M):
            one = states[:, k], text[place + k][None, None], every
            pairs, memory = pair_scores(drafter, *one, memory)
            found.append(logits[:, k] + pairs[:, 0])
        return states, jnp.stack(found, axis=1)

    slots = places[..., None] + jnp.arange(M, dtype=jnp.int32)[None, None]
    for b, a in np.ndindex(places.shape):
        states, logits = one_by_one(taps[b], tokens[b], places[b, a])
        np.testing.assert_allclose(hidden[b, a], states[0], atol=2e-5)
        previous = tokens[b, slots[b, a]][None]
        found = training.forced(drafter, head_of(model), states, previous)[1]
        np.testing.assert_allclose(found, logits, atol=1e-4)


def test_the_loss_is_that_of_its_definition(model):
    """Slot k is compared with the target's state at the root's place + k."""
    options = KINDS["dspark"] | dict(slots=M, confidence_pairs=True)
    drafter, out = random_dflash(model, **options), head_of(model)
    batch = batch_of(drafter, np.random.default_rng(1))
    found = training.Blocks(drafter.config).loss(drafter.params, batch, out)
    _, q, alone, sure = training.block_scores(drafter, out, batch)
    p = jax.nn.log_softmax(logits_of(out, batch["states"][:, :, 0])[..., :REAL])
    total, weight = 0.0, np.exp(-np.arange(M) / DECAY)
    for n, (b, a) in enumerate(np.ndindex(2, 3)):
        for k in range(M):
            at = np.exp(np.asarray(p[b, int(batch["places"][b, a]) + k], np.float64))
            own, c = np.exp(np.asarray(q[n, k], np.float64)), float(sure[n, k])
            kept_ = np.minimum(at, own).sum()
            bce = -kept_ * np.log(c) - (1 - kept_) * np.log(1 - c)
            kl = (at * np.log(at / own)).sum()
            kl += (at * (np.log(at) - np.asarray(alone[n, k]))).sum() / 4
            total += weight[k] * (kl + 1 - kept_ + bce) / 6
    np.testing.assert_allclose(found, total / weight.sum(), rtol=1e-4)


def test_the_token_of_the_slots_is_the_rarest(model):
    text = np.concatenate([np.arange(REAL - 2), [REAL - 1]])
    assert training.rarest_token(text, model.config) == REAL - 2
    assert training.rarest_token(text[:-1], model.config) == REAL - 1
