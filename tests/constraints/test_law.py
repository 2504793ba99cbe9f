"""Test that constrained text has the distribution of plain decoding under the same
masks, with every rule, by enumeration; and that classic mistakes are noticed."""

from dataclasses import replace
from itertools import product
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.sampling.constraints import NONE, Constraints
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation import step
from stree_jax.speculation.accept import Rule
from tests import distribution
from tests.distribution import (
    DRAFTER_WIDTH,
    PLACES,
    PROMPT,
    ROWS,
    SETTINGS,
    TARGET_WIDTH,
    TREES,
    VOCAB,
    drawn,
    model,
    p_value,
    processed,
)

# States after each token. In state 2 only token 4 is allowed, in state 3 two are.
FOLLOWING = np.array(
    [
        [1, NONE, 2, NONE, 3, 1],
        [2, 0, NONE, 1, NONE, 3],
        [NONE, NONE, NONE, NONE, 1, NONE],
        [NONE, 2, NONE, 0, NONE, NONE],
    ]
)
# Drafts: right in state 2, one of two tokens in state 3, and two in a row in state 1.
FORCED = np.array([[NONE, NONE], [0, 4], [4, NONE], [1, 4]])
RULES = [
    (Rule("leviathan", "iid"), "chain"),
    (Rule("mss", "iid"), "bushy"),
    (Rule("recursive", "without_replacement"), "bushy"),
    (Rule("naive", "top_k"), "bushy"),
    (Rule("naive", "coupled"), "chain"),
]


def constraints():
    """Returns the automaton in all rows. Each token is a class, in another order."""
    rows, order = len(SETTINGS) * ROWS, np.array([3, 1, 4, 0, 5, 2])
    following = np.full((1, *FOLLOWING.shape), NONE)
    following[0][:, order] = FOLLOWING
    zeros = jnp.zeros((rows,), jnp.int32)
    tables = (x.astype(np.int32) for x in (order[None], following))
    ends = jnp.zeros((1, len(FOLLOWING)), bool)
    return Constraints(
        *map(jnp.asarray, tables),
        ends,
        jnp.asarray(FORCED[None], jnp.int32),
        jnp.full(ends.shape, NONE, jnp.int32),
        zeros,
        zeros,
    )


def joint(target, s):
    """Returns the distribution [V] * PLACES of plain decoding under the masks."""
    texts = np.array(list(product(range(VOCAB), repeat=PLACES)))
    before = np.concatenate([np.full((len(texts), 1), PROMPT), texts[:, :-1]], axis=1)
    logits, found = np.asarray(stree_jax.score(target, before)), np.ones(len(texts))
    for i, text in enumerate(texts):
        state = 0
        for place, token in enumerate(text):
            allowed = FOLLOWING[state] >= 0
            p = processed(np.where(allowed, logits[i, place], -np.inf), s)
            found[i] *= p[token]
            state = FOLLOWING[state, token]
            if state == NONE:
                found[i] = 0
                break
    return found.reshape((VOCAB,) * PLACES)


@pytest.fixture(scope="module")
def experiment():
    target = model(1, TARGET_WIDTH)
    expected = np.array([joint(target, s) for s in SETTINGS])
    return target, model(2, DRAFTER_WIDTH), expected


def p_of(experiment, rule, tree):
    target, drafter, expected = experiment
    assert np.allclose(expected.sum(axis=(1, 2, 3)), 1)
    counts = drawn(target, drafter, TREES[tree], rule, constraints())
    return p_value(counts, expected)


@pytest.mark.parametrize(
    ("rule", "tree"), RULES, ids=[f"{r.acceptance}-{r.drafting}" for r, _ in RULES]
)
def test_the_law_is_that_of_masked_plain_decoding(rule, tree, experiment):
    assert p_of(experiment, rule, tree) > 0.01


def test_a_draft_model_drafts_under_the_masks(experiment):
    """Without forced drafts, which would hide the others."""
    with mock.patch.object(step, "with_forced", lambda draft, dist: draft):
        assert (
            p_of(experiment, Rule("recursive", "without_replacement"), "bushy") > 0.01
        )


_after, _forced = Distribution.after, step.with_forced


def _a_level_late(dist, token):
    """Nodes are masked by the state before their own token."""
    return replace(_after(dist, token), state=dist.state)


def _rejected_branch(dist, token):
    """The state goes on with another token than the accepted one."""
    return replace(_after(dist, token), state=_after(dist, (token + 1) % VOCAB).state)


def _forced_with_old_q(draft, dist):
    """Forced tokens count as draws from the drafter's probabilities."""
    return replace(_forced(draft, dist), q=draft.q)


NAIVE = Rule("naive", "top_k")
MISTAKES = {
    "a level late": (Distribution, "after", _a_level_late, NAIVE),
    "rejected branch": (Distribution, "after", _rejected_branch, NAIVE),
    "no masks": (Distribution, "_constrained", lambda *args: args[1], NAIVE),
    "forced with old q": (step, "with_forced", _forced_with_old_q, distribution.MSS),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(name, experiment):
    *where, wrong, rule = MISTAKES[name]
    with mock.patch.object(*where, wrong):
        assert p_of(experiment, rule, "bushy") < 1e-6
