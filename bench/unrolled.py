"""Compares packed and unrolled verification of beam-search trees: STree's Table 1.

Packed verification runs all nodes of a tree in one pass with one state. Unrolled
verification, the baseline, makes a separate sequence with its own state for the path to
each leaf. Both draft the same trees and accept the same tokens.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench import method, tables
from bench.arms import (
    PLAIN,
    Arm,
    Workload,
    begin_arm,
    check_ties,
    decode_once,
    record_of,
    summarise_cells,
    workload,
)
from bench.charts import lines, panels
from bench.device_memory import compiled_bytes
from bench.inputs import RANDOM_PROMPT, load_models, load_prompts, settings_of
from bench.method import Run, sign_test, take_turns
from bench.options import SHAPE, add_prompts
from bench.prompts import Prompt, rounds
from bench.shapes import random_pair, random_prompts
from bench.unroll import Unrolled, is_leaf
from stree_jax.cli.options import add
from stree_jax.generation.result import Generation
from stree_jax.models import Model
from stree_jax.speculation import loop
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import resolve_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "unrolled", 2
PACKED = "packed"
FIGURES = (
    "tau",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "ms_per_call",
    "over_packed",
    "p_packed",
    "equal",
    "first_call_s",
)


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10, needed=False)
    shape = "random weights of this target's shape, random prompts (default: --prompts)"
    b.add_argument("--shape", help=shape)
    add(b, "--drafter-shape", str, SHAPE, "of the drafter, with --shape")
    widths, depths = "nodes of a beam's level", "levels of a beam below the root"
    add(b, "--beam-widths", int, (2, 3, 4, 5), widths, "+", dest="widths")
    add(b, "--beam-depths", int, (4, 8, 16), depths, "+", dest="depths")
    scans = "how the tokens of a path are gone through"
    add(b, "--scans", str, ("step",), scans, "+", ["step", "chunk"])


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Decodes greedily with beams of every width and depth, packed and unrolled.

    A unit is a prompt with a beam, "WIDTHxDEPTH/SET/i"; the first prompt goes through
    all beams before the second. Before a beam's first prompt its drafts' leaves are
    counted on all prompts (see `prepare`), again in a resumed run.

    Returns:
      the report; "results" are `summarise_beams`.

    Raises:
      ValueError: options that contradict each other, or a beam without a node.
      RuntimeError: tokens differ from plain decoding's beyond a tie.
    """
    beams = [f"{w}x{d}" for d in args.depths for w in args.widths]
    for beam in beams:
        resolve_tree(f"beam:{beam}")
    target, drafter, prompts = load_inputs(args)
    plain_arm = Arm(PLAIN, None)
    work = workload(target, drafter, [plain_arm], prompts, args.max_new_tokens)
    every = [text for texts in prompts.values() for text in texts]
    prepared = cache(lambda beam: prepare(work, beam, args.scans, every))
    plain = cache(lambda text: decode_once(work, plain_arm, [text], 0))
    warm: dict[str, set[str]] = {beam: set() for beam in beams}

    def unit(beam: str, text: Prompt) -> dict[str, Any]:
        options = prepared(beam), text, plain(text), run.repeats, warm[beam]
        return decode_text(work, *options)

    units = {
        f"{beam}/{title}/{i}": partial(unit, beam, text)
        for i, groups in enumerate(rounds(prompts))
        for title, (text,) in groups.items()
        for beam in beams
    }
    settings = settings_of(NAME, {"": (target, drafter)}, prompts)
    settings |= method.settings_of(args, "widths depths scans max_new_tokens")
    report = method.measure(settings, units, run)
    return {**report, "results": summarise_beams(report["units"])}


def load_inputs(
    args: argparse.Namespace,
) -> tuple[Model, Model, dict[str, list[Prompt]]]:
    """Loads a pair and prompts, or makes random ones of `--shape`."""
    if (args.shape is None) == (args.prompts is None):
        raise ValueError("bench unrolled: want either --prompts or --shape")
    if args.shape is None:
        return *load_models(args), load_prompts(args)
    if args.widen != 1:
        raise ValueError("bench unrolled: --widen is for models, not for --shape")
    target, drafter = random_pair(args.shape, args.drafter_shape, args.dtype)
    ids = random_prompts(target.config, args.count, RANDOM_PROMPT)
    return target, drafter, {f"{args.shape}, {args.drafter_shape}": ids}


def leaves_of(parents: jax.Array) -> jax.Array:
    """Counts the leaves [B] int32 of trees with parents [B, T], -1 for the root."""
    return is_leaf(parents).sum(axis=1, dtype=jnp.int32)


@jax.jit
def _draft_leaves(spec: Spec, d: Decoding) -> jax.Array:
    dist = d.distribution(spec.target.config.num_tokens)
    (tree,) = spec.policy.menu
    draft, _ = spec.drafter.propose(d.drafting, d.root, tree, dist, spec.rule)
    return leaves_of(draft.layout.parents)


def count_leaves(work: Workload, arm: Arm, text: Prompt) -> list[int]:
    """Decodes a text with packed verification and returns the number of leaves of the
    draft at each step."""
    decoding, plan = begin_arm(work, arm, [text], 0)
    counts = []
    while (np.asarray(decoding.finish) == RUNNING).any():
        counts.append(int(_draft_leaves(plan.spec, decoding)[0]))
        decoding = loop.advance_jit(plan.spec, decoding, jnp.int32(1))
    return counts


def program_bytes(work: Workload, arm: Arm, text: Prompt) -> dict[str, int | None]:
    """Returns the memory that the compiled decoding loop needs, as counted by
    `compiled_bytes`."""
    decoding, plan = begin_arm(work, arm, [text], 0)
    steps = jnp.int32(loop.FOREVER)
    lowered = loop.advance_jit.lower(plan.spec, decoding, steps, verify=arm.verify)
    return compiled_bytes(lowered.compile())


@dataclass(frozen=True)
class Prepared:
    """The setups that are compared for one beam.

    Attributes:
      arms: the setups by name of their verification, packed first.
      leaves: the number of leaves of every draft of every prompt.
      memory: the memory of the setups' compiled programs, see `program_bytes`.
    """

    arms: dict[str, Arm]
    leaves: list[int]
    memory: dict[str, dict[str, int | None]]


def prepare(
    work: Workload,
    beam: str,
    scans: Sequence[Literal["step", "chunk"]],
    texts: Sequence[Prompt],
) -> Prepared:
    """Compiles packed and unrolled verification for a beam.

    The unrolled program has as many sequences as the draft with the most leaves. A beam
    may have depth (width - 1) + 1 leaves but usually has fewer. For drafts with fewer
    leaves the remaining sequences are padding, which a real engine would not compute.
    This choice gives the baseline as little padding as a single program for all drafts
    allows.
    """
    packed = Arm(PACKED, f"beam:{beam}")
    leaves = [n for text in texts for n in count_leaves(work, packed, text)]
    arms = {PACKED: packed}
    for scan in scans:
        arms[scan] = Arm(scan, packed.tree, verify=Unrolled(max(leaves), scan))
    memory = {name: program_bytes(work, arm, texts[0]) for name, arm in arms.items()}
    return Prepared(arms, leaves, memory)


def decode_text(
    work: Workload,
    prepared: Prepared,
    text: Prompt,
    plain: Generation,
    repeats: int,
    warm: set[str],
) -> dict[str, Any]:
    """Decodes a prompt with every setup of a beam alternately, and returns the record.

    The record of a setup that runs out of memory has no "seconds".

    Raises:
      RuntimeError: tokens differ from plain decoding at a place that is no tie.
    """
    calls: dict[str, Callable[[], Generation]] = {
        name: partial(decode_once, work, arm, [text], 0)
        for name, arm in prepared.arms.items()
    }
    results, first = take_turns(calls, repeats, warm, skip_too_large=True)
    last = {name: turns[-1] for name, turns in results.items() if turns}
    check_ties(work.target, [text], {PLAIN: plain} | last)
    arms: dict[str, Any] = {name: {"seconds": []} for name in results}
    for name in last:
        arms[name] = record_of(results[name], last.get(PACKED), first.get(name))
    return {
        "leaves_most": max(prepared.leaves),
        "leaves_mean": sum(prepared.leaves) / len(prepared.leaves),
        "arms": {name: prepared.memory[name] | arms[name] for name in arms},
    }


def summarise_beams(units: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per set, beam and arm that was measured.

    Returns:
      "set", "width", "depth"; "nodes", 1 + width depth;
      "scan", "packed", "step" or "chunk"; "units", prompts; "tau", of all of them;
      "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", median and quartiles over
      prompts of medians over turns; "ms_per_call", median; "over_packed", median over
      prompts of time over the packed arm's, and "p_packed" of its sign test, both None
      for packed; "equal", prompts whose tokens are the packed arm's (others differ from
      a tie on); "leaves", the most of any draft, for which the unrolled program is
      compiled; "leaves_mean", of all drafts; "leaves_bound", depth (width - 1) + 1;
      "states" in memory; "tokens_per_call" computed, leaves (depth + 1) if unrolled;
      "memory_bytes", "temp_bytes" of the program of the loop with the drafter
      (`compiled_bytes`); "first_call_s", with compilation. If an arm ran out of memory,
      "units" is 0 and other measurements are None.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, record in units.items():
        beam, title, _ = name.split("/")
        groups.setdefault((title, beam), []).append(record)
    rows = []
    for (title, beam), records in groups.items():
        width, depth = map(int, beam.split("x"))
        leaves = max(record["leaves_most"] for record in records)
        shape = {"set": title, "width": width, "depth": depth}
        shape |= {"nodes": 1 + width * depth, "leaves": leaves}
        shape["leaves_mean"] = records[0]["leaves_mean"]
        shape["leaves_bound"] = depth * (width - 1) + 1
        for scan in records[0]["arms"]:
            row = shape | {"scan": scan, "states": 1, "tokens_per_call": shape["nodes"]}
            if scan != PACKED:
                row |= {"states": 1 + leaves, "tokens_per_call": leaves * (depth + 1)}
            arms = [record["arms"] for record in records]
            rows.append(row | summarise_scan(arms, scan))
    return rows


def summarise_scan(records: Sequence[dict[str, Any]], scan: str) -> dict[str, Any]:
    """Returns statistics of one way to verify over the prompts of a set."""
    row: dict[str, Any] = dict.fromkeys(FIGURES) | {"units": 0}
    row |= {name: records[0][scan][name] for name in ("memory_bytes", "temp_bytes")}
    records = [r for r in records if r[scan]["seconds"] and r[PACKED]["seconds"]]
    if not records:
        return row
    cells = [record[scan] for record in records]
    row |= summarise_cells(cells) | {"equal": sum(c["equal"] for c in cells)}
    if scan != PACKED:
        ratios = [
            median(r[scan]["seconds"]) / median(r[PACKED]["seconds"]) for r in records
        ]
        row |= {"over_packed": median(ratios), "p_packed": sign_test(ratios)}
    return row


def table(report: dict[str, Any]) -> str:
    """Returns the paper's table for each set and scan, and then all rows."""
    sections = []
    for title, rows in tables.by(report["results"], "set").items():
        for scan in report["scans"]:
            sections += [
                f"{title}, {report['sets'][title]} prompts, {report['max_new_tokens']} "
                f"new tokens: packed / unrolled ({scan}), tokens/s; MB",
                _paper_table(rows, scan),
            ]
    columns = [
        ("set", "set"),
        ("M x N", lambda row: f"{row['width']} x {row['depth']}"),
        ("scan", "scan"),
        ("tau", "tau", ".2f"),
        tables.quartiles("tokens/s", "tokens_per_s", ".1f"),
        ("ms/call", "ms_per_call", ".2f"),
        ("over packed, p", _over_packed),
        ("equal", lambda r: f"{r['equal']}/{r['units']}" if r["units"] else None),
        (
            "leaves: most (mean, bound)",
            lambda r: f"{r['leaves']} ({r['leaves_mean']:.1f}, {r['leaves_bound']})",
        ),
        ("states", "states"),
        ("tokens/call", "tokens_per_call"),
        ("memory, MB", "memory_bytes", "MB"),
        ("temporaries, MB", "temp_bytes", "MB"),
    ]
    return "\n\n".join([*sections, tables.table(columns, report["results"])])


def _over_packed(row: dict[str, Any]) -> str | None:
    over = row["over_packed"]
    return None if over is None else f"{over:.2f}, {row['p_packed']:.2g}"


def _paper_table(rows: Sequence[dict[str, Any]], scan: str) -> str:
    """Returns the table in the form of the paper's Table 1, with a row for each depth N
    and a column for each width M of the beam."""
    found = {(row["width"], row["depth"], row["scan"]): row for row in rows}
    speed = tables.Column("", "tokens_per_s", ".1f", tables.OUT_OF_MEMORY)
    size = tables.Column("", "memory_bytes", "MB")

    def cell(depth: int, width: int) -> str | None:
        pair = [found.get((width, depth, name)) for name in (PACKED, scan)]
        if None in pair:
            return None
        parts = (" / ".join(map(column.cell, pair)) for column in (speed, size))
        return "; ".join(parts)

    columns: list[Any] = [("N", lambda depth: depth)]
    columns += [
        (f"M = {width}", partial(cell, width=width))
        for width in sorted({row["width"] for row in rows})
    ]
    return tables.table(columns, sorted({row["depth"] for row in rows}))


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws speed and memory against depth, a colour a width, of the first set."""
    figure, axes = panels(2, report, "Beam trees, packed and unrolled")
    first = next(iter(report["sets"]))
    rows = [row for row in report["results"] if row["set"] == first]
    title = f"{first}, {report['max_new_tokens']} new tokens"
    values = (
        ("tokens_per_s", "tokens/s", title),
        ("MB", "MB, the compiled loop", "memory by the program's own analysis"),
    )
    styles = {PACKED: "-", "step": "--", "chunk": ":"}
    for scan, own in tables.by(rows, "scan").items():
        name = PACKED if scan == PACKED else f"unrolled, {scan}"
        made = [
            row
            | {"label": f"width {row['width']}, {name}"}
            | {"MB": tables.ratio(row["memory_bytes"], 1e6)}
            for row in sorted(own, key=lambda row: report["widths"].index(row["width"]))
        ]
        for ax, (y, ylabel, about) in zip(axes, values, strict=True):
            style = {"linestyle": styles[scan]}
            words = "depth of the tree", ylabel, about
            lines(ax, made, "depth", y, "label", *words, style, from_zero=True)
            ax.set_xticks(report["depths"])
    axes[0].get_legend().remove()
    axes[1].legend(fontsize=7, frameon=False, handlelength=4)
    return {"": figure}
