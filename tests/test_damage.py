"""A few of the random damages of tests/damage.py; run that for many."""

from tests.damage import damage, kills


def test_damaged_checkpoints_are_refused_or_work():
    assert damage(150, seed=1) == []


def test_killed_conversions_leave_nothing_or_everything():
    tally = kills(5, seed=1)
    assert tally.failures == []
    assert tally.kills == 5
