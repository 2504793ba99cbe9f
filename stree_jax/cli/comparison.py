"""`stree-jax generate --compare`: speculative and plain decoding, timed alternately."""

import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

from stree_jax.generation.result import Generation

# A run of a short text takes milliseconds, and other load on the machine can change
# that by half. So both arms run alternately, MIN_TURNS times each or more, until MIN_S
# seconds have passed. A comparison whose turns are slow ends after SLOW_S seconds.
MIN_TURNS, MAX_TURNS = 3, 200
MIN_S, SLOW_S = 2.0, 30.0

Run = Callable[[], Generation]


def timed_in_turn(
    arms: Sequence[Run], clock: Callable[[], float] = time.perf_counter
) -> list[list[Generation]]:
    """Runs compiled arms alternately, in reverse order in every other turn.

    Args:
      arms: functions that decode once.
      clock: returns seconds.

    Returns:
      for each arm its results, one for each turn.
    """
    results: list[list[Generation]] = [[] for _ in arms]
    began, turns = clock(), 0
    while True:
        order = list(enumerate(arms))
        for i, arm in order if turns % 2 == 0 else order[::-1]:
            results[i].append(arm())
        turns, took = turns + 1, clock() - began
        enough = turns >= MIN_TURNS and took >= MIN_S
        if enough or took >= SLOW_S or turns >= MAX_TURNS:
            return results


def median_run(results: Sequence[Generation]) -> Generation:
    """Returns the run whose decoding took the median time (the lower of two)."""
    middle = median_low([result.decode_s for result in results])
    return next(result for result in results if result.decode_s == middle)


def nothing_drafted(rows: Sequence[dict[str, Any]]) -> bool:
    """True if every target pass had a single node, so that both arms did the same work.

    Args:
      rows: the rows of a report, see `terminal.figures`.
    """
    return all(
        size == "1" or not calls
        for row in rows
        for size, calls in row["calls_by_tree_size"].items()
    )


def closing_line(report: dict[str, Any]) -> str:
    """Returns the line after a generated text: its length, speed and exactness.

    Args:
      report: see `terminal.figures`. With `--compare` it has the figures of plain
        decoding, too.
    """
    rows = report.get("samples", [report])
    count = sum(len(row["tokens"]) for row in rows)
    tau = count / max(sum(row["target_calls"] for row in rows), 1)
    acceptance = f"acceptance length {tau:.2f}"
    if "plain" in report:
        parts = [f"{count} tokens", *speeds_of(report), acceptance, verdict(report)]
        return f"[{', '.join(parts)}]\n{drafting_line(rows)}"
    parts = [f"{count} tokens", acceptance]
    parts.append(f"{report['first_run_s']:.1f} s with compilation")
    if report["promise"] == "nothing":
        parts.append("not the target's distribution (rule typical)")
    return f"[{', '.join(parts)}]"


def speeds_of(report: dict[str, Any]) -> list[str]:
    """Returns the speeds of both arms of a comparison, in words."""
    rows = report.get("samples", [report])
    plain = f"{report['plain']['tokens_per_s']:.0f} tokens/s"
    speed = f"{report['tokens_per_s']:.0f} tokens/s"
    if nothing_drafted(rows):
        return [speed, f"nothing was drafted (plain decoding: {plain})"]
    runs = f"medians of {report['turns']} runs"
    return [speed, f"{report['speedup']:.2f}x plain decoding ({plain}; {runs})"]


def verdict(report: dict[str, Any]) -> str:
    """Returns whether the output is that of plain decoding, in words."""
    if report["promise"] == "nothing":
        return "not the distribution of plain decoding (rule typical)"
    if report["equal_to_plain"] is None:
        return "same distribution as plain decoding"
    if report["equal_to_plain"]:
        return "output identical"
    return (
        f"output DIFFERS from plain decoding at token {report.get('first_difference')},"
        f" where the logits of the two tokens differ by "
        f"{report.get('logit_gap_there', 0):.1g}"
    )


def drafting_line(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line with the origins of the tokens and the sizes of the trees."""

    def total(name: str) -> dict[str, int]:
        return {key: sum(row[name][key] for row in rows) for key in rows[0][name]}

    origins, sizes = total("tokens_by_origin"), total("calls_by_tree_size")
    count = max(sum(origins.values()), 1)
    proposed = [f"{name} {n / count:.0%}" for name, n in origins.items() if n]
    passes = [
        f"{calls} with {size} node{'s' * (size != '1')}"
        for size, calls in sizes.items()
        if calls
    ]
    line = f"[proposed by: {', '.join(proposed)}"
    line += f"; target passes: {', '.join(passes)}"
    expected = [row["expected_tokens"] for row in rows]
    if None not in expected:
        line += f"; tree auto expected {sum(expected):.0f} tokens"
    return line + "]"
