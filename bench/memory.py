"""Reproduces the figures of SpecMemo (Yildirim and Chen 2025): the memory of a
generation by part, and what fits in a limit.

`budgets` counts bytes of models that need not be run. The rest runs Medusa heads and
measures speed and bytes for each cache, tree and number of heads (Fig. 10), for pruned
trees and the best trees of their size (Fig. 11, 12), and for each batch size (Fig. 8).
`conversations` measures conversations at several budgets.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bench import arms, budgets, charts, conversations, method, tables
from bench.arms import PLAIN, Arm, Workload
from bench.budgets import Subject, run_time
from bench.device_memory import cache_row_bytes
from bench.inputs import load_models, load_prompts, settings_of
from bench.method import Run
from bench.options import add_prompts
from bench.prompts import Prompt, read_turns, rounds
from bench.widen import widened_heads
from stree_jax.checkpoints.kinds.heads import load_heads
from stree_jax.cli.options import add
from stree_jax.models import Model
from stree_jax.models.drafters.heads import Heads
from stree_jax.sizing.memory import memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.default_tree import tree_for
from stree_jax.speculation.drafters.medusa import accuracy_of
from stree_jax.speculation.gain import Acceptance, expected_tau
from stree_jax.speculation.tree import Tree, resolve_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "memory", 2
PAIR = "pair"  # the models of the options, among the shapes
SHAPES = (PAIR, "mamba2-2.7b", "granite-4.0-h-micro", "llama-7b")
COUNTED = ("breakdown", "longest", "ratios", "printed")
MEASURED = ("caches", "pruned", "batch")
TURNS = "turns"
PRUNED = ("pruned:2x3x8", "pruned:3x4x16", "pruned:5x4x32", "pruned:10x4x64")
# Measurements per batch size. There are few, because each uses as many prompts as the
# batch has rows.
ROUNDS = 2


@dataclass(frozen=True)
class Models:
    """A target with a draft model and heads."""

    target: Model
    drafter: Model
    heads: Heads


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 2, needed=False, without="none, and nothing is measured")
    parts = (*COUNTED, *MEASURED, TURNS)
    add(b, "--parts", str, COUNTED, "what to count and measure", "+", parts)
    heads = "directory or hub id of Medusa heads for the target"
    add(b, "--heads-path", str, "demo-heads", heads, metavar="PATH", dest="heads")
    add(b, "--shapes", str, SHAPES, "published shapes, besides the bundled pair", "+")
    add(b, "--memory", str, "16GB", "memory limit for the shapes")
    add(b, "--small", str, "64MB", "memory limit for the bundled pair")
    add(b, "--sizes", int, (8, 16, 44, 64), "tree sizes", "+")
    add(b, "--head-counts", int, (3, 4), "numbers of heads (part caches)", "+")
    add(b, "--caches", int, (1024, 4096), "rows of a cache (part caches)", "+")
    add(b, "--pruned", str, PRUNED, "pruned trees (part caches)", "+")
    add(b, "--batches", int, (1, 2, 4, 8, 10), "prompts decoded together", "+")
    add(b, "--tree", str, "sparse:8", "tree of the heads (part batch)")
    shares = "shares of the run-time memory as limits (part turns)"
    add(b, "--shares", float, (1.0, 0.7, 0.5, 0.35), shares, "+")
    timed = (
        "time steps before planning for part turns (default: what is known or assumed)"
    )
    b.add_argument("--tune", action="store_true", help=timed)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Counts and measures the parts of the options.

    Raises:
      ValueError: a part without prompts or conversations, or caches that are too small.
    """
    heads = widened_heads(load_heads(args.heads, args.dtype), args.widen)
    models = Models(*load_models(args), heads)
    prompts = load_prompts(args)
    limits = {"limit": bytes_named(args.memory), "small": bytes_named(args.small)}
    works = works_of(models, prompts, args)
    units: dict[str, Callable[[], Any]] = {}
    for part in (part for part in args.parts if part in COUNTED):
        units |= _counted(part, models, args, **limits)
    for label, work in works.items():
        units |= _decoded(label, work, prompts, run)
    talk = None
    if TURNS in args.parts:
        turns = read_turns(args.prompts or [], args.count)
        options = args.shares, args.max_new_tokens, args.tune
        talk = conversations.plans(models.target, models.heads, turns, *options)
        units |= conversations.units(talk, run)
    names = "parts shapes sizes head_counts caches pruned batches tree shares tune"
    settings = settings_of(NAME, {"": (models.target, models.drafter)}, prompts)
    settings |= {**limits, "max_new_tokens": args.max_new_tokens}
    settings |= {name: getattr(args, name) for name in names.split()}
    report = method.measure(settings, units, run)
    found = report["units"]
    decoded = {name: record for name, record in found.items() if "/T=0/" in name}
    report["results"] = [
        with_bytes(row, works[row["pair"]]) for row in arms.summarise_arms(decoded)
    ]
    answered = [r for name, r in found.items() if name.startswith(f"{TURNS}/")]
    report["conversations"] = None
    if talk is not None and answered:
        report["conversations"] = conversations.rows(talk, answered)
    return report


def _counted(
    part: str, models: Models, args: argparse.Namespace, limit: int, small: int
) -> dict[str, Callable[[], Any]]:
    """Returns the units of a part that runs nothing."""
    count = getattr(budgets, part)

    def unit(shape: str) -> Any:
        if shape != PAIR:
            return count(budgets.subject_of(shape, limit), args.sizes)
        dtype = str(models.target.weight_format)
        return count(Subject(models.target, models.heads, dtype, small), args.sizes)

    names = [budgets.PAPER] if part == "printed" else args.shapes
    if part == "ratios":  # of published shapes with caches
        names = [name for name in names if name != PAIR and _has_caches(name)]
    return {f"{part}/{name}": partial(unit, name) for name in names}


def _has_caches(shape: str) -> bool:
    return cache_row_bytes(budgets.subject_of(shape, 0).target) > 0


def works_of(
    models: Models, prompts: dict[str, list[Prompt]], args: argparse.Namespace
) -> dict[str, Workload]:
    """Returns the workloads of the measured parts by label.

    Raises:
      ValueError: no prompts, or caches that are too small for them.
    """
    parts = [part for part in args.parts if part in MEASURED]
    if parts and not prompts:
        raise ValueError(f"--parts {parts[0]}: what is measured wants --prompts")
    if not parts:
        return {}

    def work(drafting: Sequence[Arm], batch: int = 1) -> Workload:
        ways = [Arm(PLAIN, None), *drafting]
        options = prompts, args.max_new_tokens, batch
        made = arms.workload(models.target, models.drafter, ways, *options)
        return replace(made, heads=models.heads)

    works = {}
    if "caches" in parts:
        made = work(
            [
                Arm(f"{k} heads, sparse:{n}", f"sparse:{n}", drafting="heads", heads=k)
                for k in args.head_counts
                for n in args.sizes
            ]
        )
        for rows in args.caches:
            if rows < made.capacity:
                raise ValueError(f"--caches: want {made.capacity} rows, got {rows}")
            works[f"caches of {rows} rows"] = replace(made, capacity=rows)
    if "pruned" in parts:
        trees = dict.fromkeys(
            tree
            for name in args.pruned
            for tree in (f"sparse:{resolve_tree(name).size}", name)
        )
        works["pruned trees"] = work(list(map(_heads_arm, trees)))
    if "batch" in parts:
        drafting = [_heads_arm(args.tree), Arm("model, chain:4", "chain:4")]
        works |= {f"batch {n}": work(drafting, n) for n in args.batches}
    return works


def _heads_arm(tree: str) -> Arm:
    return Arm(f"heads, {tree}", tree, drafting="heads")


def _decoded(
    label: str, work: Workload, prompts: dict[str, list[Prompt]], run: Run
) -> dict[str, Callable[[], Any]]:
    """Returns the units of a workload, greedy, named as `summarise_arms` reads them."""
    warm = set[str]()

    def unit(texts: Sequence[Prompt]) -> dict[str, Any]:
        if not warm:  # programs of all workloads together exhaust memory maps
            jax.clear_caches()
        return arms.decode_unit(work, texts, 0.0, run.repeats, warm)

    few = rounds(prompts, work.batch)
    if label.startswith("batch"):
        few = few[:ROUNDS]
    return {
        f"{label}/{title}/T=0/{i}": partial(unit, texts)
        for i, groups in enumerate(few)
        for title, texts in groups.items()
    }


def with_bytes(row: dict[str, Any], work: Workload) -> dict[str, Any]:
    """Returns a row with the bytes of its generation, and the expected tau.

    The expected tau is of trees of heads, by the accuracies that come with the heads.
    """
    arm = next(arm for arm in work.arms if arm.name == row["arm"])
    drafter, expected = work.drafter_of(arm), None
    if isinstance(drafter, Heads):
        tree = tree_for(drafter, arm.tree, None)
        if isinstance(tree, Tree):
            expected = expected_tau(tree, Acceptance(np.array(accuracy_of(drafter))))
    else:
        tree = resolve_tree("chain:0" if arm.tree is None else arm.tree)
    room = BufferSizes(work.batch, work.capacity, bucket(work.max_new_tokens))
    memory = memory_of(work.target, drafter, tree, room)
    return row | {
        "nodes": tree.size,
        "expected_tau": expected,
        "bytes": memory.total,
        "run_time": run_time(memory),
        "steps_run_time": run_time(memory) - (memory.total - memory.steps_total),
    }


def units_of(report: dict[str, Any], part: str) -> dict[str, Any]:
    """Returns the records of a counted part by shape."""
    begin = f"{part}/"
    return {
        name.removeprefix(begin): rows
        for name, rows in report["units"].items()
        if name.startswith(begin)
    }


COLUMNS = [
    ("of", "pair"),
    ("set", "set"),
    ("arm", "arm"),
    ("nodes", "nodes"),
    ("tau", "tau", ".2f"),
    ("expected", "expected_tau", ".2f"),
    ("tokens/s", "tokens_per_s", ".0f"),
    ("over plain (quartiles)", "speedup", ".2f"),
    ("MB", "bytes", "MB"),
    ("MB but weights", "run_time", "MB"),
    ("of the steps", "steps_run_time", "MB"),
    tables.equal(),
]


def table(report: dict[str, Any]) -> str:
    """Returns a section for each counted part, the measured ones, conversations."""
    sections = [
        getattr(budgets, f"{part}_table")(units_of(report, part), report)
        for part in report["parts"]
        if part in COUNTED
    ]
    if report["results"]:
        sections.append(tables.table(COLUMNS, report["results"]))
    if report["conversations"]:
        sections.append(conversations.turns_table(report["conversations"]))
    return "\n\n".join(sections)


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws a figure for each part that has one."""
    counted = {"breakdown": budgets.draw_breakdown, "longest": budgets.draw_longest}
    measured: dict[str, Callable[[Any], Figure]] = {
        "caches": draw_caches,
        "pruned": draw_pruned,
        "batch": draw_batch,
        TURNS: conversations.draw_turns,
    }
    found = {}
    for part in report["parts"]:
        if part in counted:
            found[f"-{part}"] = counted[part](units_of(report, part), report)
        elif part in measured:
            found[f"-{part}"] = measured[part](report)
    return found


def _rows(report: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Returns the rows of a measured part, of the first set."""
    first = next(iter(report["sets"]))
    return [
        row
        for row in report["results"]
        if row["pair"].startswith(part) and row["set"] == first
    ]


VALUES: dict[str, tables.Value] = {
    "tokens a call": "tau",
    "times plain decoding": lambda row: row["speedup"]["median"],
    "MB of the steps but weights": lambda row: row["steps_run_time"] / 1e6,
    "MB but weights": lambda row: row["run_time"] / 1e6,
}


def _draw(
    ax: Any, rows: Sequence[Any], by: tables.Value, what: str, **options: Any
) -> None:
    """Draws one of `VALUES` against the nodes of the tree."""
    words = "nodes in the tree", what
    charts.lines(ax, rows, "nodes", VALUES[what], by, *words, from_zero=True, **options)


def draw_caches(report: dict[str, Any]) -> "Figure":
    """Draws speed against nodes by number of heads, a panel a size, and bytes."""
    rows = _rows(report, "caches")
    drafted = [row for row in rows if row["arm"] != PLAIN]
    groups = tables.by(drafted, "pair")
    figure, axes = charts.panels(1 + len(groups), report, "Caches, trees and heads")
    for ax, (name, own) in zip(axes, groups.items(), strict=False):
        options = {"title": name, "guide": 1}
        _draw(ax, own, _heads, "times plain decoding", **options)
    _draw(axes[-1], rows, "pair", "MB of the steps but weights", style=charts.POINTS)
    return figure


def _heads(row: dict[str, Any]) -> str:
    """Returns the heads in the name of an arm."""
    return row["arm"].partition(",")[0]


def draw_pruned(report: dict[str, Any]) -> "Figure":
    """Draws tau, speed and bytes of pruned trees and of the best of equal size."""
    figure, axes = charts.panels(3, report, "Pruned trees")
    rows = [row for row in _rows(report, "pruned") if row["arm"] != PLAIN]

    def kind(row: dict[str, Any]) -> str:
        return "pruned" if "pruned" in row["arm"] else "best of equal size"

    for ax, what in zip(axes, VALUES, strict=False):
        _draw(ax, rows, kind, what)
    return figure


def _batch(row: dict[str, Any]) -> int:
    return int(row["pair"].split()[1])


def draw_batch(report: dict[str, Any]) -> "Figure":
    """Draws speedup, and bytes, against the rows of a batch."""
    figure, axes = charts.panels(2, report, "Rows of a batch")
    rows = _rows(report, "batch")
    for ax, what in zip(axes, ("times plain decoding", "MB but weights"), strict=True):
        words = "rows of the batch", what
        charts.lines(ax, rows, _batch, VALUES[what], "arm", *words, from_zero=True)
    return figure
