"""Which way of decoding is fastest here: predicted by `stree_jax.cost`, then measured.

Predicted without running any speculation: from times of single passes of target and
drafter, the loop's overhead in plain decoding, and the ranks that the tokens of plain
texts have among the drafter's guesses. Measured by decoding those texts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from stree_jax import cost
from stree_jax.bench.method import Run, measure
from stree_jax.bench.passes import Case, compile_case, time_cases
from stree_jax.bench.prompts import Prompt, rounds
from stree_jax.bench.speculation import (
    PLAIN,
    Arm,
    decode_once,
    decode_unit,
    parse_arm,
    settings_of,
    workload,
)
from stree_jax.bench.tables import table
from stree_jax.checkpoints.load import Model
from stree_jax.generation import encode_prompts
from stree_jax.speculation.tree import Topology, Tree, resolve_tree

OPTIMAL = (3, 4, 6, 8, 12, 16)  # nodes of the trees that the acceptance asks for
DEPTH, WIDTH = 6, 4  # of the acceptance table
PASSES = 16  # a call: single passes of a small model take less than their dispatch


def measure_cost(
    target: Model,
    drafter: Model,
    prompts: dict[str, list[Prompt]],
    *,
    arms: Sequence[str],
    max_new_tokens: int,
    run: Run,
) -> dict[str, Any]:
    """Predicted and measured speeds of chains, named trees and optimal ones, greedy.

    Units: "ranks" (of all texts), "target" and "drafter" (times of passes), and one for
    each prompt, decoded by all arms.

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and

      "acceptance": the table p [depth][rank] of `cost.Acceptance`.
      "results": a row an arm, the fastest prediction first: "arm", "nodes", "depth",
        "parents", "expected_tau" (by the table), "simulated_tau" (by the ranks), "tau"
        (measured), "predicted_ms" and "ms" a step, "predicted" and "speedup" over plain
        decoding, "error", predicted / speedup - 1.

    Raises:
      ValueError: an unknown tree, or one that is chosen anew at every step.
    """
    for name in arms:
        if not isinstance(resolve_tree(name), Tree):
            raise ValueError(
                f"--arms: {name} has no fixed shape to predict; leave it out"
            )
    plain = workload(target, drafter, [parse_arm(PLAIN)], prompts, max_new_tokens)
    context = plain.capacity - 256

    def ranks() -> list[list[int]]:
        rows = []
        for text in (text for texts in prompts.values() for text in texts):
            (tokens,) = decode_once(plain, plain.arms[0], [text], 0).tokens
            (ids,) = encode_prompts(target, [text])
            rows.append(cost.drafter_ranks(drafter, ids, tokens).tolist())
        return rows

    def passes(model: Model, sizes: Sequence[int]) -> dict[str, float]:
        cases = [Case(size, "packed", context) for size in sizes]
        programs = [compile_case(model, case, PASSES) for case in cases]
        records = time_cases(programs, 4 * run.repeats)
        return {str(r["nodes"]): median(r["seconds"]) for r in records}

    warm: set[str] = set()

    @cache
    def ranks_and_trees() -> tuple[list[list[int]], dict[str, Tree]]:
        """Made again by a run that goes on: greedy texts are the same each time."""
        found = ranks()
        return found, candidates(arms, found)

    def work(unit: str) -> Any:
        if unit == "ranks":
            return ranks_and_trees()[0]
        trees = ranks_and_trees()[1]
        if unit == "target":
            return passes(target, sorted({1, *(t.size for t in trees.values())}))
        if unit == "drafter":
            widths = {t.width for t in trees.values()}
            return passes(
                drafter, sorted(widths | {t.depth + 1 for t in trees.values()})
            )
        named = [Arm(name, _spec(tree)) for name, tree in trees.items()]
        work = replace(plain, arms=(*plain.arms, *named))
        return decode_unit(work, decoded[unit], 0, run.repeats, warm, {})

    decoded = {
        f"/{title}/T=0/{i}": texts
        for i, groups in enumerate(rounds(prompts))
        for title, texts in groups.items()
    }
    settings = settings_of("cost", {"": (target, drafter)}, prompts) | {
        "arms": list(arms),
        "max_new_tokens": max_new_tokens,
    }
    units = ["ranks", "target", "drafter", *decoded]
    report = measure(settings, units, work, run)
    return {**report, **_predictions(report["units"], arms)}


def candidates(arms: Sequence[str], ranks: cost.Ranks) -> dict[str, Tree]:
    """The arms' trees, and the best trees of OPTIMAL sizes for these ranks."""
    table = cost.acceptance_from_ranks(ranks, DEPTH, WIDTH)
    named = {name: resolve_tree(name) for name in arms}
    trees = {name: tree for name, tree in named.items() if isinstance(tree, Tree)}
    return trees | {f"optimal:{n}": cost.greedy_tree(table, n) for n in OPTIMAL}


def _spec(tree: Tree) -> tuple[int, ...]:
    return tuple(np.asarray(tree.parents).tolist())


def _predictions(units: dict[str, Any], arms: Sequence[str]) -> dict[str, Any]:
    """The report's "acceptance" and "results", once all but some prompts are there."""
    decoded = {name: record for name, record in units.items() if "/" in name}
    if not decoded:
        return {"acceptance": None, "results": []}
    ranks = units["ranks"]
    table = cost.acceptance_from_ranks(ranks, DEPTH, WIDTH)
    trees = candidates(arms, ranks)
    rows = merged(decoded)
    # What a step of plain decoding takes beyond its pass, a step with a tree takes too.
    target = {int(n): s for n, s in units["target"].items()}
    # Noise may make that less than nothing.
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
                "expected_tau": 1.0 if tree is None else cost.expected_tau(tree, table),
                "simulated_tau": row.tau,
                "predicted_ms": 1e3 * row.step_s,
                "predicted": row.speedup,
                **seen,
                "error": row.speedup / seen["speedup"] - 1,
            }
        )
    return {
        "acceptance": table.p.tolist(),
        "overhead_ms": 1e3 * overhead,
        "results": results,
    }


def _name(trees: dict[str, Tree], tree: Topology) -> str:
    return next(name for name, other in trees.items() if other is tree)


def merged(units: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measured tau, ms a step and speed-up of every arm, over all prompts together."""

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
    """What the model says, and whether measuring agrees."""
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


def cost_table(report: dict[str, Any]) -> str:
    """Predicted and measured, the fastest prediction first, and the verdict."""
    if not report["results"]:
        return "nothing decoded yet"
    head = ["arm", "nodes", "depth", "tau by table", "by ranks", "measured"]
    head += ["ms a step, predicted", "measured", "over plain, predicted", "measured"]
    lines = []
    for row in report["results"]:
        cells = [row["arm"], str(row["nodes"]), str(row["depth"])]
        numbers = ("expected_tau", "simulated_tau", "tau", "predicted_ms", "ms")
        cells += [f"{row[name]:.2f}" for name in (*numbers, "predicted", "speedup")]
        lines.append([*cells, f"{row['error']:+.0%}"])
    worst = max(abs(row["error"]) for row in report["results"])
    sections = [
        table([*head, "error"], lines),
        verdict(report) + f" Largest error of a prediction: {worst:.0%}.",
        table(
            ["depth", *(f"rank {r}" for r in range(WIDTH))],
            [
                [str(depth), *(f"{p:.2f}" for p in row)]
                for depth, row in enumerate(report["acceptance"], start=1)
            ],
        ),
    ]
    return "\n\n".join(sections)
