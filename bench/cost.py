"""Predicts with the cost model (`stree_jax.cost`) which trees decode fastest on this
machine, and compares the predictions with measurements.

The prediction runs no speculation. It is made from times of single passes of target and
drafter, the loop's overhead in plain decoding, and the ranks that the tokens of plain
texts have among the drafter's guesses. The measurement decodes those texts.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import method, tables
from bench.arms import (
    MARGIN,
    PLAIN,
    Arm,
    decode_once,
    decode_unit,
    parse_arm,
    workload,
)
from bench.charts import POINTS, lines, panels
from bench.inputs import load_models, load_prompts, settings_of
from bench.method import Run
from bench.options import add_arms, add_prompts
from bench.passes import Case, compile_case, time_cases
from bench.prompts import Prompt, rounds
from stree_jax import cost
from stree_jax.cli.figures import GUIDE
from stree_jax.generation.generate import encode_prompts
from stree_jax.models import Model
from stree_jax.speculation.tree import Topology, Tree, resolve_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "cost", 5
ARMS = ["chain:1", "chain:2", "chain:3", "chain:4", "A", "E"]
OPTIMAL = (3, 4, 6, 8, 12, 16)  # nodes of the trees that are best for the acceptance
DEPTH, WIDTH = 6, 4  # depths and ranks in the table of acceptance rates
# Passes per timed call: a pass of a small model takes less time than dispatching it.
PASSES = 16


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    add_arms(b, ARMS, "TREE")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Predicts and measures the speed of greedy decoding with chains, named trees and
    the trees that are optimal by the cost model.

    The units are "ranks" (the ranks of all texts), "target" and "drafter" (the times of
    their passes), and one unit per prompt, which all trees decode.

    Returns:
      The report, with

      - "acceptance": the table p [depth][rank] of `cost.Acceptance`;
      - "results": a row per tree, the one with the largest predicted speedup first.
        "expected_tau" is computed from that table, "simulated_tau" from the ranks, and
        "tau" is measured. "predicted_ms" and "ms" are milliseconds per step.
        "predicted" and "speedup" are relative to plain decoding, and "error" is
        predicted / speedup - 1. "arm" is the tree's name; "nodes", "depth" and
        "parents" describe it.

    Raises:
      ValueError: a tree is unknown or has no fixed shape.
    """
    for name in args.arms:
        if not isinstance(resolve_tree(name), Tree):
            raise ValueError(
                f"--arms: {name} has no fixed shape to predict; leave it out"
            )
    target, drafter = load_models(args)
    prompts = load_prompts(args)
    plain = workload(target, drafter, [parse_arm(PLAIN)], prompts, args.max_new_tokens)

    @cache  # computed again in a resumed run: greedy texts are the same each time
    def ranks() -> list[list[int]]:
        rows = []
        for text in (text for texts in prompts.values() for text in texts):
            (tokens,) = decode_once(plain, plain.arms[0], [text], 0).tokens
            (ids,) = encode_prompts(target, [text])
            rows.append(cost.drafter_ranks(drafter, ids, tokens).tolist())
        return rows

    def trees() -> dict[str, Tree]:
        return candidates(args.arms, ranks())

    def passes(model: Model, sizes: set[int]) -> dict[str, float]:
        cases = [Case(n, "packed", plain.capacity - MARGIN) for n in sorted(sizes)]
        programs = [compile_case(model, case, PASSES) for case in cases]
        records = time_cases(programs, 4 * run.repeats)
        return {str(r["nodes"]): median(r["seconds"]) for r in records}

    def drafter_passes() -> dict[str, float]:
        found = trees().values()
        return passes(drafter, {t.width for t in found} | {t.depth + 1 for t in found})

    warm = set[str]()

    def decode(texts: Sequence[Prompt]) -> dict[str, Any]:
        named = [Arm(name, _spec(tree)) for name, tree in trees().items()]
        work = replace(plain, arms=(*plain.arms, *named))
        return decode_unit(work, texts, 0, run.repeats, warm)

    units: dict[str, Callable[[], Any]] = {
        "ranks": ranks,
        "target": lambda: passes(target, {1, *(t.size for t in trees().values())}),
        "drafter": drafter_passes,
    }
    units |= {
        f"/{title}/T=0/{i}": partial(decode, texts)
        for i, groups in enumerate(rounds(prompts))
        for title, texts in groups.items()
    }
    settings = settings_of(NAME, {"": (target, drafter)}, prompts)
    settings |= {"arms": args.arms, "max_new_tokens": args.max_new_tokens}
    report = method.measure(settings, units, run)
    return {**report, **_predictions(report["units"], args.arms)}


def candidates(arms: Sequence[str], ranks: cost.Ranks) -> dict[str, Tree]:
    """Returns the trees to compare, by name.

    Args:
      arms: names of trees; those without a fixed shape are left out.
      ranks: the ranks of the prompts' tokens in the draft model's predictions. The best
        trees for them, with the numbers of nodes in `OPTIMAL`, are added.
    """
    acceptance = cost.acceptance_from_ranks(ranks, DEPTH, WIDTH)
    named = {name: resolve_tree(name) for name in arms}
    trees = {name: tree for name, tree in named.items() if isinstance(tree, Tree)}
    return trees | {f"optimal:{n}": cost.greedy_tree(acceptance, n) for n in OPTIMAL}


def _spec(tree: Tree) -> tuple[int, ...]:
    return tuple(np.asarray(tree.parents).tolist())


def _predictions(units: dict[str, Any], arms: Sequence[str]) -> dict[str, Any]:
    """Returns "acceptance" and "results" of the report, from the prompts so far."""
    decoded = {name: record for name, record in units.items() if "/" in name}
    if not decoded:
        return {"acceptance": None, "results": []}
    ranks = units["ranks"]
    acceptance = cost.acceptance_from_ranks(ranks, DEPTH, WIDTH)
    trees = candidates(arms, ranks)
    rows = merged(decoded)
    # A step with a tree has the same overhead as one of plain decoding.
    target = {int(n): s for n, s in units["target"].items()}
    # Noise in the measured times may make the difference negative.
    overhead = max(rows[PLAIN]["ms"] / 1e3 - target[1], 0.0)
    verify = cost.MeasuredTime(list(target), [s + overhead for s in target.values()])
    draft_sizes = [int(n) for n in units["drafter"]]
    draft = cost.MeasuredTime(draft_sizes, list(units["drafter"].values()))
    taus = {name: cost.simulated_tau(tree, ranks) for name, tree in trees.items()}
    results = []
    for row in cost.best(trees, lambda tree: taus[_name(trees, tree)], verify, draft):
        seen, tree = rows[row.name], trees.get(row.name)
        results.append(
            {
                "arm": row.name,
                "nodes": row.size,
                "depth": 0 if tree is None else tree.depth,
                "parents": [-1] if tree is None else list(_spec(tree)),
                "expected_tau": 1.0
                if tree is None
                else cost.expected_tau(tree, acceptance),
                "simulated_tau": row.tau,
                "predicted_ms": 1e3 * row.step_s,
                "predicted": row.speedup,
                **seen,
                "error": row.speedup / seen["speedup"] - 1,
            }
        )
    return {
        "acceptance": acceptance.p.tolist(),
        "overhead_ms": 1e3 * overhead,
        "results": results,
    }


def _name(trees: dict[str, Tree], tree: Topology) -> str:
    return next(name for name, other in trees.items() if other is tree)


def merged(units: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns measured tau, ms a step and speedup by arm, over all prompts together."""

    def total(arm: str) -> tuple[int, int, float]:
        cells = [record[arm] for record in units.values()]
        seconds = sum(median(cell["seconds"]) for cell in cells)
        return sum(c["tokens"] for c in cells), sum(c["calls"] for c in cells), seconds

    measured = {}
    for arm in next(iter(units.values())):
        tokens, calls, seconds = total(arm)
        measured[arm] = {
            "tau": tokens / calls,
            "ms": 1e3 * seconds / calls,
            "speedup": total(PLAIN)[2] / seconds,
        }
    return measured


def verdict(report: dict[str, Any]) -> str:
    """Says which arm is predicted to be fastest, and which was."""
    rows = report["results"]
    said = rows[0]
    fastest = max(rows, key=lambda row: row["speedup"])
    text = (
        f"With this target, drafter and machine: {said['arm']} is fastest, "
        f"{said['predicted']:.2f} times plain decoding (measured "
        f"{said['speedup']:.2f})."
    )
    if said["arm"].startswith("optimal"):
        parents = ",".join(map(str, said["parents"][1:]))
        text += f" It is `--tree parents:{parents}`."
    if fastest is said:
        return text + " None of the others was measured to be faster."
    return (
        text + f" Measured, {fastest['arm']} is: {fastest['speedup']:.2f} (predicted "
        f"{fastest['predicted']:.2f})."
    )


def table(report: dict[str, Any]) -> str:
    """Returns predictions and measurements, fastest prediction first, the verdict."""
    if not report["results"]:
        return "nothing decoded yet"
    columns = [
        ("arm", "arm"),
        ("nodes", "nodes"),
        ("depth", "depth"),
        ("tau by table", "expected_tau", ".2f"),
        ("by ranks", "simulated_tau", ".2f"),
        ("measured", "tau", ".2f"),
        ("ms a step, predicted", "predicted_ms", ".2f"),
        ("measured", "ms", ".2f"),
        ("over plain, predicted", "predicted", ".2f"),
        ("measured", "speedup", ".2f"),
        ("error", "error", "+.0%"),
    ]
    worst = max(abs(row["error"]) for row in report["results"])
    ranks: list[Any] = [("depth", lambda pair: pair[0])]
    ranks += [(f"rank {r}", lambda pair, r=r: pair[1][r], ".2f") for r in range(WIDTH)]
    sections = [
        tables.table(columns, report["results"]),
        verdict(report) + f" Largest error of a prediction: {worst:.0%}.",
        tables.table(ranks, enumerate(report["acceptance"], start=1)),
    ]
    return "\n\n".join(sections)


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws measured speedups by predicted ones, and measured tau by predicted tau."""
    figure, axes = panels(2, report, "The cost model against measurements")
    kinds = ("plain", "chain", "tree", "optimal")
    pairs = (("predicted", "speedup"), ("simulated_tau", "tau"))
    names = ("times plain decoding", "tokens per target call (τ)")

    def kind(row: dict[str, Any]) -> str:
        named = row["arm"].partition(":")[0]
        return named if named in kinds else "tree"

    rows = sorted(report["results"], key=lambda row: kinds.index(kind(row)))
    for ax, (x, y), name in zip(axes, pairs, names, strict=True):
        words = f"{name}, predicted", f"{name}, measured"
        lines(ax, rows, x, y, kind, *words, style=POINTS)
        for row in rows:
            label = row["arm"].partition(":")[2] or row["arm"]
            place = {"xytext": (3, 3), "textcoords": "offset points"}
            ax.annotate(label, (row[x], row[y]), fontsize=7, **place)
        values = [row[name] for row in rows for name in (x, y)]
        ends = [min(values), max(values)]
        ax.plot(ends, ends, **GUIDE)
    return {"": figure}
