"""Measures the acceptance rules at several temperatures (STree, Fig. 4)."""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench import decode, tables
from bench.arms import PLAIN, tree_of
from bench.charts import lines, panels
from bench.options import (
    add_arms,
    add_batch,
    add_prompts,
    add_temperatures,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "temperature", 2
ARMS = [
    "leviathan@chain:4",
    "mss@A",
    "recursive@A",
    "naive@A",
    "naive/coupled@A",
]
measure = decode.measure


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 8)
    add_arms(b, ARMS)
    add_temperatures(b, (0, 0.25, 0.5, 0.75, 1.0))
    add_batch(b)


def row_of(
    rows: Sequence[dict[str, Any]], arm: str, temperature: float
) -> dict[str, Any] | None:
    """Returns the row of an arm; at T = 0 that of the arm with the same tree."""

    def same(name: str) -> bool:
        return name == arm or (temperature == 0 and tree_of(name) == tree_of(arm))

    at = (row for row in rows if row["temperature"] == temperature)
    return next((row for row in at if same(row["arm"])), None)


def table(report: dict[str, Any]) -> str:
    """Returns tau and speedup by arm and temperature, a table for each set."""
    sections = []
    for title, rows in tables.by(report["results"], "set").items():
        count, batch = report["sets"][title], report["batch"]
        sections += [
            f"{title}, {count} prompts, batch {batch}: tau (over plain)",
            _set_table(rows),
        ]
    return "\n\n".join(sections)


def _set_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a row per arm, and one with the speeds of plain decoding."""
    plain = {row["temperature"]: row for row in rows if row["arm"] == PLAIN}

    def cell(arm: str | None, temperature: float) -> str | None:
        if arm is None:
            return f"{plain[temperature]['tokens_per_s']:.0f}"
        row = row_of(rows, arm, temperature)
        if row is None:
            return None
        return f"{row['tau']:.2f} ({row['speedup']['median']:.2f}x)"

    columns: list[Any] = [("rule and tree", lambda arm: arm or "plain, tokens/s")]
    columns += [(f"T = {t:g}", partial(cell, temperature=t)) for t in sorted(plain)]
    return tables.table(columns, [*dict.fromkeys(row["arm"] for row in rows), None])


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws tau and speedup against temperature, mean over the prompt sets."""
    figure, axes = panels(2, report, "Acceptance rules against temperature")
    sets = tables.by(report["results"], "set").values()
    means = []
    for arm in (arm for arm in report["arms"] if arm != PLAIN):
        for temperature in report["temperatures"]:
            rows = [row_of(rows, arm, temperature) for rows in sets]
            tau = [row["tau"] for row in rows if row]
            speed = [row["speedup"]["median"] for row in rows if row]
            if tau:
                row = {"arm": arm, "T": temperature}
                means.append(row | {"tau": fmean(tau), "speed": fmean(speed)})
    words = "tokens per target call (τ)", f"mean of {', '.join(report['sets'])}"
    lines(axes[0], means, "T", "tau", "arm", "temperature", *words)
    words = "times plain decoding", f"batch {report['batch']}"
    lines(axes[1], means, "T", "speed", "arm", "temperature", *words, guide=1)
    return {"": figure}
