"""`generate --compare`: which runs are compared, and what is said of them. Times are of
a clock of the test's own."""

import json

import pytest

from stree_jax.cli import comparison, terminal
from stree_jax.cli import main as cli
from stree_jax.generation.generate import generate
from tests.support.table_models import byte_level, follow, padded_size, write_llama


class Timed:
    def __init__(self, decode_s):
        self.decode_s = decode_s


def turns(monkeypatch, seconds, times):
    """Returns the order of the runs and the median times.

    Args:
      seconds: duration of each run on the fake clock.
      times: `decode_s` of each run, by arm.
    """
    now, order = [0.0], []

    def arm(name):
        def run():
            now[0] += seconds
            order.append(name)
            return Timed(times[name][order.count(name) - 1])

        return run

    results = comparison.timed_in_turn([arm("a"), arm("b")], lambda: now[0])
    return "".join(order), [comparison.median_run(r).decode_s for r in results]


def test_arms_alternate_and_medians_are_reported(monkeypatch):
    """One slow run of an arm (a = 9, b = 8) does not change the medians."""
    times = {"a": [1.0, 9.0, 2.0], "b": [8.0, 3.0, 4.0]}
    order, medians = turns(monkeypatch, 1.0, times)
    assert order == "abbaab" and medians == [2.0, 4.0]


def test_short_runs_are_repeated_and_long_ones_are_not(monkeypatch):
    order, _ = turns(monkeypatch, 0.1, {"a": [1.0] * 99, "b": [1.0] * 99})
    assert len(order) >= 2.0 / 0.1
    order, _ = turns(monkeypatch, 20.0, {"a": [1.0], "b": [1.0]})
    assert order == "ab"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that writes "bcdefgh..." after "a", without a repetition."""
    tokenizer = byte_level()
    letters = [chr(ord("a") + i) for i in range(20)]
    chain = follow(tokenizer, [*letters, "</s>"], rest=2)
    return write_llama(
        tmp_path_factory.mktemp("models") / "llama",
        padded_size(tokenizer),
        tokenizer=tokenizer,
        chain=chain,
    )


@pytest.fixture
def two_turns(monkeypatch):
    monkeypatch.setattr(comparison, "MIN_S", 0.0)
    monkeypatch.setattr(comparison, "MIN_TURNS", 2)


def compared(capsys, model, *options):
    args = "generate", "b", "--model", str(model), "--max-new-tokens", "12", "--compare"
    assert cli.main([*args, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_no_speedup_is_reported_if_nothing_was_drafted(
    model, drafter, capsys, two_turns
):
    out = compared(capsys, model, "--drafter", drafter)
    assert "nothing was drafted (plain decoding: " in out
    assert "x plain decoding" not in out and "output identical" in out
    report = json.loads(compared(capsys, model, "--drafter", drafter, "--json"))
    assert report["calls_by_tree_size"] == {"1": 12} | {
        size: 0 for size in report["calls_by_tree_size"] if size != "1"
    }
    assert report["speedup"] > 0 and report["equal_to_plain"] is True


def test_the_plain_arm_has_no_drafter(model, capsys, two_turns, monkeypatch):
    """The speedup over plain decoding is measured on runs without a drafter."""
    asked = []

    def recorded(*args, **options):
        asked.append(options.get("drafter"))
        return generate(*args, **options)

    monkeypatch.setattr(terminal, "generate", recorded)
    out = compared(capsys, model, "--drafter", str(model), "--tree", "chain:2")
    assert "x plain decoding (" in out and "nothing was drafted" not in out
    drafted = [drafter is not None for drafter in asked]
    assert drafted == [False, True, False, False, True]  # the first one compiles
