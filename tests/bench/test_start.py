"""`bench start`: processes that are timed from outside."""

import sys

import pytest

from bench import start
from bench.command import measure
from bench.registry import parse_bench


def test_a_process_is_timed_from_outside():
    code = "import time; kept = b'x' * 300_000_000; time.sleep(0.3)"
    seconds, peak = start.seconds_and_peak([sys.executable, "-c", code], None)
    assert seconds > 0.3 and 300e6 < peak < 400e6


def test_a_command_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"no such model"):
        start.seconds_and_peak(
            [sys.executable, "-c", "raise SystemExit('no such model')"], None
        )


def test_every_start_is_measured():
    words = ["start", "--models", "demo", "--repeats", "1", "--max-new-tokens", "4"]
    report = measure(parse_bench(words))
    rows = {row["start"]: row for row in report["results"]}
    assert list(rows) == [start.COLD, start.WARM, start.KEPT, start.INFO]
    assert rows[start.COLD]["seconds"] > rows[start.WARM]["seconds"]
    assert rows[start.WARM]["seconds"] > rows[start.KEPT]["seconds"]
    parts = sum(rows[start.WARM][part] for part in start.PARTS)
    assert 0 < parts < 3 * rows[start.WARM]["seconds"]
    lines = start.table(report).splitlines()
    assert len(lines) == 4 + len(rows) and "import of jax" in lines[2]
