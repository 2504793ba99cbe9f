"""Test a few of the random damages of tests/damage, which runs many."""

from tests.damage.run import run


def test_damaged_checkpoints_are_refused_or_work():
    tally = run(1, list(range(150)), quiet=True)
    assert tally.failures == []
    assert tally.refused["own arrays"] > 0 and tally.accepted["own arrays"] == 0


def test_damaged_gguf_files_are_refused_or_work():
    tally = run(1, list(range(100)), quiet=True, only="gguf")
    assert tally.failures == []
    assert tally.refused["gguf edit"] > 20 and tally.accepted["gguf bytes"] > 0


def test_commands_write_one_line():
    tally = run(1, [], commands=list(range(6)), quiet=True)
    assert tally.failures == []
    assert tally.command_refusals > 0


def test_killed_conversions_leave_nothing_or_everything():
    tally = run(1, [], kills=5, quiet=True)
    assert tally.failures == []
    assert tally.kills == 5
