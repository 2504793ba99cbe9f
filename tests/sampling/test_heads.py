"""Test that text sampled with Medusa heads has the target's distribution."""

import pytest

from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters import medusa
from tests import distribution
from tests.support.heads import random_heads


@pytest.fixture(scope="module")
def experiment():
    """Returns an experiment with heads, which are often wrong, as the drafter."""
    found = distribution.Experiment()
    found.drafter = random_heads(found.target, seed=2, scale=0.5, heads=3)
    return found


RULES = [
    (Rule("leviathan", "iid"), "chain"),
    (Rule("mss", "iid"), "bushy"),
    (Rule("recursive", "without_replacement"), "bushy"),
    (Rule("naive", "coupled"), "bushy"),
]


@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_the_joint_distribution_matches_the_target(experiment, rule, tree):
    assert experiment.p_value(rule, tree) > 0.01


_draw_level = medusa.draw_level


def test_wrong_draft_probabilities_are_found(experiment, monkeypatch):
    """The rule gets probabilities of half the temperature."""

    def wrong(draft, logits, depth, *rest):
        drawn = _draw_level(draft, logits, depth, *rest)
        other = _draw_level(draft, 2 * logits, depth, *rest)
        return drawn.replace(q=other.q)

    monkeypatch.setattr(medusa, "draw_level", wrong)
    assert experiment.p_value(Rule("mss", "iid"), "bushy") < 1e-6


def test_typical_acceptance_changes_the_distribution(experiment):
    assert experiment.p_value(Rule("typical", "top_k"), "bushy") < 1e-6
