"""`bench memory`: SpecMemo's figures (Yildirim and Chen 2025) that carry over.

`budgets` counts bytes of models that need not be run. Measured here, with Medusa
heads: speed and bytes by caches, tree and number of heads (Fig. 10), by pruned trees
beside the best of equal size (Fig. 11, 12), by rows of a batch (Fig. 8), and of
conversations with what the planner takes at several budgets (`budget_turns`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from stree_jax.bench import budget_turns, budgets
from stree_jax.bench.budgets import Subject, run_time
from stree_jax.bench.method import Run, measure
from stree_jax.bench.prompts import Prompt, rounds
from stree_jax.bench.shapes import config_of
from stree_jax.bench.speculation import (
    PLAIN,
    Arm,
    Workload,
    decode_unit,
    settings_of,
    summarise_arms,
    workload,
)
from stree_jax.buckets import bucket
from stree_jax.checkpoints.load import Model
from stree_jax.default_tree import accuracy_of, tree_for
from stree_jax.models.heads import Heads
from stree_jax.options import COUNTED, MEMORY_PARTS, MEMORY_SHAPES
from stree_jax.sizing.memory import Room, memory_of
from stree_jax.speculation.gain import Acceptance, expected_tau
from stree_jax.speculation.tree import Tree, resolve_tree

PAIR = MEMORY_SHAPES[0]  # the models that the options name
TURNS = MEMORY_PARTS[-1]
ROUNDS = 2  # of every size of a batch: large ones need many prompts, small ones not
MEASURED = tuple(part for part in MEMORY_PARTS if part not in (*COUNTED, TURNS))


@dataclass(frozen=True)
class Options:
    """What is counted and measured.

    Attributes:
      parts: of `COUNTED`, `MEASURED` and `TURNS`.
      shapes: published ones, and `PAIR`.
      limit, small: bytes for shapes, and for the pair.
      sizes: nodes of trees.
      head_counts, caches: of part "caches", the latter in rows.
      pruned: trees of that part, by name.
      batches, tree: of part "batch": rows decoded together, and the heads' tree.
      shares: of part "turns": of the run-time memory, see `budget_turns`.
      tune: whether steps are timed before the planner is asked there.
      max_new_tokens: of every row and turn.
    """

    parts: tuple[str, ...]
    shapes: tuple[str, ...]
    limit: int
    small: int
    sizes: tuple[int, ...]
    head_counts: tuple[int, ...]
    caches: tuple[int, ...]
    pruned: tuple[str, ...]
    batches: tuple[int, ...]
    tree: str
    shares: tuple[float, ...]
    tune: bool
    max_new_tokens: int


@dataclass(frozen=True)
class Models:
    """Who decodes."""

    target: Model
    drafter: Model
    heads: Heads


def measure_memory(
    models: Models,
    prompts: dict[str, list[Prompt]],
    turns: Sequence[Sequence[str]],
    options: Options,
    run: Run,
) -> dict[str, Any]:
    """The report of the parts that are asked for.

    Args:
      prompts: of the measured parts; may be none without them.
      turns: conversations, what the user says in them; likewise.

    Raises:
      ValueError: a part without prompts or conversations, or what does not fit.
    """
    works = works_of(models, prompts, options)
    units: dict[str, Callable[[], Any]] = {}
    for part in options.parts:
        if part in COUNTED:
            units |= _counted(part, models, options)
    warm: dict[str, set[str]] = {label: set() for label in works}
    for label, work in works.items():
        units |= _decoded(label, work, prompts, run, warm[label])
    talk = None
    if TURNS in options.parts:
        asked = options.shares, options.max_new_tokens, options.tune
        talk = budget_turns.plans(models.target, models.heads, turns, *asked)
        units |= budget_turns.units(talk, run)
    pair = models.target, models.drafter
    settings = settings_of("memory", {"": pair}, prompts) | {
        name: getattr(options, name) for name in Options.__dataclass_fields__
    }
    report = measure(settings, units, lambda name: units[name](), run)
    report["results"] = [
        with_bytes(row, works[row["pair"]]) for row in _measured_rows(report["units"])
    ]
    said = [r for name, r in report["units"].items() if name.startswith(f"{TURNS}/")]
    report["conversations"] = None
    if talk is not None and said:
        report["conversations"] = budget_turns.rows(talk, said)
    return report


def subject(shape: str, models: Models, options: Options) -> Subject:
    """A shape, or the pair itself with its heads."""
    if shape != PAIR:
        return budgets.subject_of(shape, options.limit)
    dtype = str(models.target.weight_format)
    return Subject(models.target, models.heads, dtype, options.small)


def _counted(
    part: str, models: Models, options: Options
) -> dict[str, Callable[[], Any]]:
    """The units of a part that runs nothing."""
    ask = partial(subject, models=models, options=options)
    if part == "printed":
        return {f"{part}/{budgets.PAPER}": lambda: budgets.printed(ask(budgets.PAPER))}
    names = [
        shape
        for shape in options.shapes
        if part != "ratios"
        or (shape != PAIR and "attention" in config_of(shape).layers)
    ]
    function: Callable[..., Any] = getattr(budgets, part)
    return {
        f"{part}/{name}": partial(_rows, function, ask, name, options.sizes)
        for name in names
    }


def _rows(
    function: Callable[..., list[dict[str, Any]]],
    ask: Callable[[str], Subject],
    shape: str,
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    return function(ask(shape), sizes)


def works_of(
    models: Models, prompts: dict[str, list[Prompt]], options: Options
) -> dict[str, Workload]:
    """The measured parts, by label: who decodes how in what room.

    Raises:
      ValueError: no prompts, or caches that are too small for them.
    """
    parts = [part for part in options.parts if part in MEASURED]
    if parts and not prompts:
        raise ValueError(f"--parts {parts[0]}: what is measured wants --prompts")
    if not parts:
        return {}
    plain = Arm(PLAIN, None)

    def work(arms: Sequence[Arm], batch: int = 1) -> Workload:
        args = models.target, models.drafter, [plain, *arms], prompts
        made = workload(*args, options.max_new_tokens, batch)
        return replace(made, heads=models.heads)

    works = {}
    if "caches" in parts:
        arms = [
            Arm(f"{k} heads, sparse:{n}", f"sparse:{n}", drafting="heads", heads=k)
            for k in options.head_counts
            for n in options.sizes
        ]
        made = work(arms)
        for rows in options.caches:
            if rows < made.capacity:
                raise ValueError(f"--caches: want {made.capacity} rows, got {rows}")
            works[f"caches of {rows} rows"] = replace(made, capacity=rows)
    if "pruned" in parts:
        works["pruned trees"] = work(pruned_arms(options.pruned))
    if "batch" in parts:
        drafted = [Arm(f"heads, {options.tree}", options.tree, drafting="heads")]
        drafted.append(Arm("model, chain:4", "chain:4"))
        works |= {f"batch {n}": work(drafted, n) for n in options.batches}
    return works


def pruned_arms(names: Sequence[str]) -> list[Arm]:
    """Each pruned tree, and the best of as many nodes, once."""
    arms = {}
    for name in names:
        for tree in (f"sparse:{resolve_tree(name).size}", name):
            arms[tree] = Arm(f"heads, {tree}", tree, drafting="heads")
    return list(arms.values())


def _decoded(
    label: str,
    work: Workload,
    prompts: dict[str, list[Prompt]],
    run: Run,
    warm: set[str],
) -> dict[str, Callable[[], Any]]:
    """The units of a workload, greedy, named as `summarise_arms` reads them."""

    def unit(texts: Sequence[Prompt]) -> dict[str, Any]:
        if not warm:  # of many programs, a process runs out of memory maps
            jax.clear_caches()
        return decode_unit(work, texts, 0.0, run.repeats, warm, {})

    few = rounds(prompts, work.batch)
    if label.startswith("batch"):
        few = few[:ROUNDS]
    return {
        f"{label}/{title}/T=0/{i}": partial(unit, texts)
        for i, groups in enumerate(few)
        for title, texts in groups.items()
    }


def _measured_rows(units: dict[str, Any]) -> list[dict[str, Any]]:
    return summarise_arms({n: r for n, r in units.items() if "/T=0/" in n})


def with_bytes(row: dict[str, Any], work: Workload) -> dict[str, Any]:
    """A row with the bytes of its generation, and what tau its tree was expected to
    have by the accuracies that came with the heads."""
    arm = next(arm for arm in work.arms if arm.name == row["arm"])
    drafter, expected = work.drafter_of(arm), None
    if isinstance(drafter, Heads):
        tree = tree_for(drafter, arm.tree, None)
        if isinstance(tree, Tree):
            expected = expected_tau(tree, Acceptance(np.array(accuracy_of(drafter))))
    else:
        tree = resolve_tree("chain:0" if arm.tree is None else arm.tree)
    room = Room(work.batch, work.capacity, bucket(work.max_new_tokens))
    memory = memory_of(work.target, drafter, tree, room)
    return row | {
        "nodes": tree.size,
        "expected_tau": expected,
        "bytes": memory.total,
        "run_time": run_time(memory),
        "steps_run_time": run_time(memory) - (memory.total - memory.steps_total),
    }
