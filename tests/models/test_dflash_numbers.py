"""Test block drafters against float64 NumPy, in published layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.drafters.dflash import (
    add_context,
    draft_logits,
    empty_context,
    run_block,
)
from stree_jax.models.drafters.dflash_pairs import confidence, no_memory, pair_scores
from tests.support import drafter_reference as reference
from tests.support.drafter_params import dflash_of
from tests.support.published_drafters import LAYOUTS, canonical, facts_of, sizes_of
from tests.support.reference import MODEL_TOLERANCE, assert_near

# Layouts that together have every mask, rotary embedding and head. (name, Markov head)
CASES = [
    ("liquid", "vanilla"),
    ("nvidia-bf16", "vanilla"),
    ("nvidia-dflash", "vanilla"),
    ("redhat-dspark", "vanilla"),
    ("redhat-dspark", "gated"),
    ("redhat-dspark", "rnn"),
    ("z-lab-flat", "vanilla"),
    ("z-lab-dflash2", "vanilla"),
]
N, ROOT, SEED = 21, 5, 4


def context_of(drafter, taps, parts):
    """Returns the state after the tokens with taps [N, m, d], read in `parts`."""
    state, at = empty_context(drafter, 1, 32, jnp.float32), 0
    for size in parts:
        rows = jnp.asarray(taps[None, at : at + size], jnp.float32)
        rows = jnp.pad(rows, ((0, 0), (0, max(parts) - size), (0, 0), (0, 0)))
        tapped = tuple(rows[:, :, j] for j in range(rows.shape[2]))
        state = add_context(drafter, state, tapped, jnp.full((1,), size, jnp.int32))
        at += size
    assert at == len(taps)
    return state


@pytest.mark.parametrize(("name", "markov"), CASES)
def test_drafts_equal_the_reference(name, markov):
    layout = LAYOUTS[name]
    sizes = sizes_of(layout.kind, {"markov": markov})
    facts, arrays = facts_of(layout, sizes), canonical(layout, SEED, sizes)
    taps = np.random.default_rng(SEED).standard_normal(
        (N, len(facts.boundaries), sizes.d)
    )
    drafter = dflash_of(arrays, facts)
    state = context_of(drafter, taps, (9, 1, 11))
    root = jnp.full((1,), ROOT, jnp.int32)
    hidden = run_block(drafter, None, state, root, facts.slots)
    first = 0 if facts.from_anchor else 1
    expected = reference.block_states(arrays, facts, taps, ROOT)[first:]
    assert_near(hidden[0], expected, MODEL_TOLERANCE["float32"])

    tokens, scores, sure = reference.draft(arrays, facts, taps, ROOT)
    ids = jnp.asarray(arrays.get("head_ids", np.arange(sizes.vocab)), jnp.int32)[None]
    logits = draft_logits(drafter, None, hidden)[:, :, ids[0]]
    memory, previous = no_memory(drafter, (1, 1)), jnp.full((1, 1), ROOT, jnp.int32)
    for depth, token in enumerate(tokens):
        h = hidden[:, depth]
        pair, memory = pair_scores(drafter, h, previous, ids, memory)
        kept = np.isfinite(scores[depth])
        ours = np.asarray(logits[0, depth] + pair[0, 0])[kept]
        assert_near(ours, scores[depth][kept], 2 * MODEL_TOLERANCE["float32"])
        if len(sure):
            own = confidence(drafter, h, previous)
            assert_near(own[0], sure[depth : depth + 1], MODEL_TOLERANCE["float32"])
        previous = jnp.full((1, 1), token, jnp.int32)
