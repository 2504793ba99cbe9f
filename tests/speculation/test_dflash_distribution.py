"""Test that text drafted by block drafters has the target's distribution, with rules
that use the probabilities of the drafts."""

from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.drafters.dflash import trimmed_dflash
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters import dflash
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.training.ngrams import count_grams, katz
from tests import distribution
from tests.distribution import MSS, RECURSIVE
from tests.support.dflash import KINDS, random_dflash

LEVIATHAN = Rule("leviathan", "iid")
CANDIDATES = 4  # of 6 tokens
IDS = [0, 1, 2, 4]
CASES = {
    "chain": (LEVIATHAN, "chain", "dspark", None),
    "mss": (MSS, "bushy", "dspark", None),
    "recursive": (RECURSIVE, "bushy", "dspark", None),
    "trimmed": (RECURSIVE, "bushy", "dspark", IDS),
    "recurrent": (LEVIATHAN, "chain", "dspark-rnn", IDS),
    "n-grams": (RECURSIVE, "bushy", "dflash", None),
}
draw_level = dflash.draw_level


@pytest.fixture(scope="module")
def experiment():
    return distribution.Experiment()


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    monkeypatch.setattr(dflash, "CANDIDATES", CANDIDATES)


def ngrams():
    """Returns n-grams of a text in which the next larger token mostly follows."""
    rng, V = np.random.default_rng(0), distribution.VOCAB
    text = np.cumsum(1 + (rng.random((40, 32)) < 0.1), axis=1) % V
    return katz(count_grams(text, 3, V), V, slots=512, keep=4)


def drafter_of(target, kind, ids):
    drafter = random_dflash(target, **KINDS[kind])
    if kind == "dflash":
        return WithNGrams(drafter, ngrams())
    pairs = drafter.params["pairs"]
    pairs = pairs | {"following": 6 * pairs["following"]}  # large enough to matter
    drafter = replace(drafter, params=drafter.params | {"pairs": pairs})
    return drafter if ids is None else trimmed_dflash(drafter, target, np.asarray(ids))


@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution_matches_the_target(name, experiment):
    rule, tree, *kind = CASES[name]
    drafter = drafter_of(experiment.target, *kind)
    assert experiment.p_value(rule, tree, drafter) > 0.01


def _q_of_all_tokens(draft, logits, *rest):
    """Draws from the candidates, but q is a distribution over all tokens."""
    lowest = jnp.where(jnp.isneginf(logits), jnp.inf, logits).min(-1, keepdims=True)
    every = jnp.where(jnp.isneginf(logits), lowest, logits)
    drawn = draw_level(draft, logits, *rest)
    return replace(drawn, q=draw_level(draft, every, *rest).q)


def _q_without_pairs(drafter, found, root, tree, dist, rule):
    """Draws with the scores of pairs, but q leaves them out."""
    alone = replace(drafter, config=replace(drafter.config, pairs=""))
    without = replace(found, pairs=None)
    draft = fill_from(drafter, found, root, tree, dist, rule)
    return replace(draft, q=fill_from(alone, without, root, tree, dist, rule).q)


fill_from = dflash.fill_from
MISTAKES = {"draw_level": _q_of_all_tokens, "fill_from": _q_without_pairs}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "dspark") for name in MISTAKES), ("fill_from", "dflash")],
)
def test_planted_mistakes_are_found(name, kind, experiment):
    drafter = drafter_of(experiment.target, kind, None)
    with mock.patch.object(dflash, name, MISTAKES[name]):
        assert experiment.p_value(LEVIATHAN, "chain", drafter) < 1e-6
