"""`stree-jax generate --compare`: both ways of decoding, timed in turn."""

import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

from stree_jax.result import Generation

# One run of a short text takes milliseconds, and other work on the machine changes it
# by half or more. So both ways run in turn, at least this often and for so many
# seconds, unless a single turn takes LONG_S.
LEAST_TURNS, MOST_TURNS = 3, 200
LEAST_S, LONG_S = 2.0, 30.0

Run = Callable[[], Generation]


def timed_in_turn(
    arms: Sequence[Run], clock: Callable[[], float] = time.perf_counter
) -> list[list[Generation]]:
    """Runs compiled arms in turn, every other turn in reverse order.

    Returns the results of each arm, one a turn.
    """
    results: list[list[Generation]] = [[] for _ in arms]
    began, turns = clock(), 0
    while True:
        order = list(enumerate(arms))
        for i, arm in order if turns % 2 == 0 else order[::-1]:
            results[i].append(arm())
        turns, took = turns + 1, clock() - began
        enough = turns >= LEAST_TURNS and took >= LEAST_S
        if enough or took >= LONG_S or turns >= MOST_TURNS:
            return results


def median_run(results: Sequence[Generation]) -> Generation:
    """Returns the run whose decoding took the median time (the lower of two)."""
    middle = median_low([result.decode_s for result in results])
    return next(result for result in results if result.decode_s == middle)


def nothing_drafted(rows: Sequence[dict[str, Any]]) -> bool:
    """True if every target pass of a report's rows was for one node, so that both ways
    of decoding did the same work."""
    return all(
        size == "1" or not calls
        for row in rows
        for size, calls in row["calls_by_tree_size"].items()
    )


def speed_of(report: dict[str, Any]) -> str:
    """Words the speed of a compared generation for its closing line."""
    rows = report.get("samples", [report])
    plain = report["plain"]["tokens_per_s"]
    line = f"{report['tokens_per_s']:.0f} tokens/s, "
    if nothing_drafted(rows):
        return line + f"nothing was drafted (plain decoding: {plain:.0f} tokens/s)"
    return (
        line + f"{report['speedup']:.2f}x plain decoding ({plain:.0f} tokens/s; "
        f"medians of {report['turns']})"
    )
