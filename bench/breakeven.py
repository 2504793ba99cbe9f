"""Computes the acceptance from which speculation pays, from measured passes.

Let t(n) be the seconds of the target's pass over n nodes, and d those of drafting. A
step gains tau tokens, the bonus token included, in t(n) + d, and plain decoding one in
t(1). So speculation pays if tau is larger than

    tau* = (t(n) + d) / t(1)

(section 4 of STree, Wu et al. 2025, and `stree_jax.cost`). If each token of a chain of
k is accepted at the rate a, given those before it, then

    tau = 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a)

(Leviathan et al. 2023, equation 1), which is solved for a. For a tree, a is the rate of
first guesses, further guesses are accepted as `assumed_acceptance` says, and the tree
is the best one for these rates (`cost.greedy_tree`). Its drafting is timed as that of a
chain of as many levels. The loop around the passes is not counted; for the bundled pair
it takes 0.15 to 0.32 ms more in a step that drafts.

Weights of shapes are random, because times do not depend on them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import method, tables
from bench.drafting import (
    check_drafter,
    compile_drafting,
    most_drafts,
    random_drafter,
)
from bench.llama_process import llama_process, llama_version
from bench.method import Run
from bench.others import threads_of_xla
from bench.passes import Turns, passes_per_dispatch
from bench.peer_passes import LLAMA, OURS, context_of, time_passes
from bench.shapes import NAMES, config_of, random_model
from stree_jax import cost
from stree_jax.checkpoints.info import described
from stree_jax.checkpoints.load import load
from stree_jax.checkpoints.resolve import resolve
from stree_jax.cli.options import add, add_dtype
from stree_jax.common.words import LOOKUP
from stree_jax.convert.tensors.gguf_header import is_gguf
from stree_jax.models import Model, ModelConfig
from stree_jax.speculation.drafters.table import source_of
from stree_jax.speculation.source import assumed_acceptance
from stree_jax.speculation.tree import MOST_CHILDREN

NAME, REPEATS = "breakeven", 5
PAIRS = (  # small models, with the drafters that are published for them
    "lfm2-1.2b:dspark",
    "lfm2-1.2b:lfm2-350m",
    "qwen3.5-0.8b:mtp",
    "qwen3.5-2b:mtp",
    "qwen3.5-2b:qwen3.5-0.8b",
    "granite-4.0-h-1b:granite-4.0-h-350m",
    "nemotron-3-nano-4b",
    "gemma-3-270m",
)
NEVER = "never"  # in the table, if a rate of 1 is still too low
NOTE = (
    "pass and drafting in passes over one node. Speculation pays from the acceptance "
    "length tau*, or the rate a* of each draft token (tree: of first guesses). The "
    "star is the number of nodes with the smallest a* of a tree. Rows of lookup hold "
    "for all drafts that cost nothing; only these have a column of llama.cpp, whose "
    "drafters are not measured."
)
MOST_NODES = 64
HALVINGS = 30  # of the interval of a rate that is searched for


def add_options(b: argparse.ArgumentParser) -> None:
    pairs = "TARGET or TARGET:DRAFTER; a target is a shape, with random weights, or a "
    pairs += "GGUF file, and is always also measured with drafts that cost nothing, as "
    pairs += "of prompt lookup; a drafter is mtp, dspark or a shape, random weights"
    add(b, "--pairs", str, PAIRS, pairs, "+", metavar="PAIR")
    add(b, "--sizes", int, (2, 4, 8, 16), "nodes of a pass, beside one", "+")
    add_dtype(b, "kept")
    python = "a Python whose environment has llama-cpp-python, built for this CPU, for "
    python += "GGUF files (default: it is left out)"
    b.add_argument("--llama-python", type=Path, help=python)


class Subject(NamedTuple):
    """A target and its drafters.

    Attributes:
      file: the target's GGUF file. None if it is a shape with random weights.
      config: its architecture, with its MTP layers.
      drafters: their names, prompt lookup first.
    """

    file: Path | None
    config: ModelConfig
    drafters: list[str]

    def load(self, dtype: str) -> Model:
        if self.file is None:
            return random_model(self.config, dtype)
        return load(self.file, dtype=dtype, mtp=None)


def subjects_of(pairs: Sequence[str]) -> dict[str, Subject]:
    """Returns the targets of `--pairs` by name.

    Raises:
      ValueError: a target is no shape and no GGUF file, or a drafter does not fit it.
    """
    found: dict[str, Subject] = {}
    for pair in pairs:
        name, _, drafter = pair.partition(":")
        if name not in found:
            file = None if name in NAMES else resolve(name)
            if file is not None and not is_gguf(file):
                raise ValueError(f"--pairs: {name} is no shape and no GGUF file")
            if file is None:
                config = config_of(name, mtp=True)
            else:
                config = described(file).config
            found[name] = Subject(file, config, [LOOKUP])
        target = found[name]
        if drafter and drafter not in target.drafters:
            check_drafter(drafter, name, target.config)
            target.drafters.append(drafter)
    return found


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures every target with its drafters. All passes of a target take turns.

    Returns:
      The report. Its "results" are the rows of `rows_of`, target by target.

    Raises:
      ValueError: a target or drafter is unknown, a size is not possible, or the Python
        has no llama-cpp-python.
    """
    for size in args.sizes:
        if not 2 <= size <= MOST_NODES:
            raise ValueError(f"--sizes: want 2..{MOST_NODES} nodes, got {size}")
    subjects = subjects_of(args.pairs)
    settings = method.settings_of(args, "pairs sizes dtype")
    settings["llama_cpp"] = args.llama_python and llama_version(args.llama_python)
    units = {
        name: partial(_times, subject, args, run.repeats)
        for name, subject in subjects.items()
    }
    report = method.measure(settings, units, run)
    results = [
        {"model": name, **row}
        for name, times in report["units"].items()
        for row in rows_of(times, args.sizes)
    ]
    return {**report, "results": results}


def _times(
    subject: Subject, args: argparse.Namespace, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of the target's passes by program and number of nodes, and
    those of drafting by drafter and number of draft tokens."""
    target, passes = subject.load(args.dtype), passes_per_dispatch()
    others = {LOOKUP: {str(n - 1): [0.0] for n in args.sizes}}
    turns = {}
    for name in subject.drafters[1:]:
        drafter = random_drafter(name, target, args.dtype)
        most = most_drafts(source_of(drafter, target.config))
        for drafts in sorted({min(size - 1, most) for size in args.sizes}):
            program = compile_drafting(target, drafter, drafts, passes)
            turns[f"{name}/{drafts}"] = Turns(program)
    sizes = sorted({1, *args.sizes})
    with ExitStack() as stack:
        ask = None
        if subject.file is not None and args.llama_python is not None:
            ask = stack.enter_context(llama_process(args.llama_python))
            options = {"path": str(subject.file), "exact": False}
            options |= {"num_tokens": target.config.num_tokens}
            options |= {"context": context_of(sizes, (), repeats)}
            ask("load", threads=threads_of_xla(), **options)
        return others | time_passes(target, ask, sizes, repeats, passes, turns)


def rows_of(
    times: Mapping[str, Mapping[str, Sequence[float]]], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Computes what each drafter needs at each number of nodes.

    Args:
      times: see `_times`.
      sizes: numbers of nodes, without 1.

    Returns:
      Rows, with "drafter"; "nodes", n; "one_ms", t(1); "pass", t(n) / t(1); "drafts",
      the tokens of the chain, n - 1 or the most of the drafter; "drafting", d / t(1);
      "tau", tau*; "chain", the rate from which such a chain pays, and "tree" that of a
      tree of n nodes and "levels" levels. A rate is None if not even 1 is enough.
      "best" is True for the number of nodes with the smallest "tree". "llama_pass" and
      "llama_chain" are "pass" and "chain" of llama.cpp with drafts that cost nothing;
      None in rows of other drafters, and if llama.cpp is not measured.
    """
    seconds = {
        name: {int(n): median(own) for n, own in by_size.items()}
        for name, by_size in times.items()
    }
    ours, llama, rows = seconds.pop(OURS), seconds.pop(LLAMA, None), []
    for drafter, drafting in seconds.items():
        own = [_row(ours, drafting, n) for n in sorted(sizes)]
        known = [row for row in own if row["tree"] is not None]
        best = min(known, key=lambda row: row["tree"], default=None)
        theirs = llama if drafter == LOOKUP else None
        for row in own:
            tau = None if theirs is None else theirs[row["nodes"]] / theirs[1]
            row |= {"drafter": drafter, "best": row is best}
            row |= {"llama_pass": tau, "llama_chain": None}
            if tau is not None:
                row["llama_chain"] = chain_rate(tau, row["drafts"])
        rows += own
    return rows


def _row(
    ours: Mapping[int, float], drafting: Mapping[int, float], n: int
) -> dict[str, Any]:
    """Returns the row of a drafter and a number of nodes, without its name, "best" and
    the values of llama.cpp."""

    def least_tau(drafts: int) -> float:
        return (ours[n] + drafting[drafts]) / ours[1]

    possible = [k for k in drafting if k < n]
    drafts = max(possible)
    trees = [(tree_rate(least_tau(k), n, k), k) for k in possible]
    tree, levels = min(((a, k) for a, k in trees if a is not None), default=(None, 0))
    return {
        "nodes": n,
        "one_ms": 1e3 * ours[1],
        "pass": ours[n] / ours[1],
        "drafts": drafts,
        "drafting": drafting[drafts] / ours[1],
        "tau": least_tau(drafts),
        "chain": chain_rate(least_tau(drafts), drafts),
        "tree": tree,
        "levels": levels,
    }


def chain_rate(tau: float, drafts: int) -> float | None:
    """Returns the acceptance rate per token with which a chain has an acceptance
    length; None if no rate is high enough."""
    return _rate(lambda a: sum(a**i for i in range(drafts + 1)), tau)


def tree_rate(tau: float, nodes: int, levels: int) -> float | None:
    """Returns the acceptance rate of first guesses with which the best tree of at most
    `levels` levels has an acceptance length; None if no rate is high enough, or if such
    a tree has fewer nodes."""

    def length(a: float) -> float:
        acceptance = assumed_acceptance(a, levels)
        return cost.expected_tau(cost.greedy_tree(acceptance, nodes), acceptance)

    full = sum(MOST_CHILDREN**i for i in range(levels + 1))
    return None if nodes > full else _rate(length, tau)


def _rate(length: Callable[[float], float], tau: float) -> float | None:
    """Returns the smallest rate from 0 to 1 for which `length`, which grows with it, is
    at least `tau`, or None."""
    if length(1.0) < tau:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if length(middle) >= tau else (middle, high)
    return high


def table(report: dict[str, Any]) -> str:
    """Returns the table, a row per target, drafter and number of nodes."""

    def rate(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: NEVER if row[name] is None else f"{row[name]:.2f}"

    def tree(row: dict[str, Any]) -> str:
        return rate("tree")(row) + f" ({row['levels']})" * (row["tree"] is not None)

    columns: list[Any] = [
        ("model", lambda row: Path(row["model"]).name),
        ("drafter", "drafter"),
        ("nodes", "nodes"),
        ("best", lambda row: "*" if row["best"] else ""),
        ("one node, ms", "one_ms", ".1f"),
        ("pass", "pass", ".2f"),
        ("drafts", "drafts"),
        ("drafting", "drafting", ".2f"),
        ("tau*", "tau", ".2f"),
        ("chain: a*", rate("chain")),
        ("tree: a* (levels)", tree),
    ]
    if report["llama_cpp"] is not None:
        columns.append(("llama.cpp: pass", "llama_pass", ".2f"))
        columns.append(("llama.cpp: a*", _theirs))
    text = tables.table(columns, report["results"])
    return f"{text}\n\n{NOTE}"


def _theirs(row: dict[str, Any]) -> str:
    if row["llama_pass"] is None:
        return "-"
    return NEVER if row["llama_chain"] is None else f"{row['llama_chain']:.2f}"
