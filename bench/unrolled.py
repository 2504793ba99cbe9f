"""Beam-search trees decoded packed and unrolled: STree's Table 1.

Both ways draft the same trees and accept the same tokens, so that what differs is the
verification: one packed pass with one state, or a sequence and a state per leaf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.bench.memory import compiled_bytes
from stree_jax.bench.method import Run, measure, sign_test, take_turns
from stree_jax.bench.prompts import Prompt, rounds
from stree_jax.bench.speculation import (
    PLAIN,
    Arm,
    Workload,
    begin_arm,
    check_ties,
    decode_once,
    record_of,
    settings_of,
    summarise_cells,
    workload,
)
from stree_jax.bench.tables import (
    OUT_OF_MEMORY,
    megabytes,
    shown,
    table,
    with_quartiles,
)
from stree_jax.bench.unroll import Unrolled, is_leaf
from stree_jax.checkpoints.load import Model
from stree_jax.result import Generation
from stree_jax.speculation import loop
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import resolve_tree

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


def leaves_of(parents: jax.Array) -> jax.Array:
    """Leaves [B] int32 of trees with parents [B, T], -1 for the root."""
    return is_leaf(parents).sum(axis=1, dtype=jnp.int32)


@jax.jit
def _draft_leaves(spec: Spec, d: Decoding) -> jax.Array:
    dist = d.distribution(spec.target.config.num_tokens)
    (tree,) = spec.policy.menu
    draft, _ = spec.drafter.propose(d.drafting, d.root, tree, dist, spec.rule)
    return leaves_of(draft.layout.parents)


def count_leaves(work: Workload, arm: Arm, text: Prompt) -> list[int]:
    """Leaves of every draft of a text, decoded packed, a step at a time."""
    decoding, plan = begin_arm(work, arm, [text], 0)
    counts = []
    while (np.asarray(decoding.finish) == RUNNING).any():
        counts.append(int(_draft_leaves(plan.spec, decoding)[0]))
        decoding = loop.advance_jit(plan.spec, decoding, jnp.int32(1))
    return counts


def program_bytes(work: Workload, arm: Arm, text: Prompt) -> dict[str, int | None]:
    """`compiled_bytes` of the loop that decodes a text."""
    decoding, plan = begin_arm(work, arm, [text], 0)
    steps = jnp.int32(loop.FOREVER)
    lowered = loop.advance_jit.lower(plan.spec, decoding, steps, verify=arm.verify)
    return compiled_bytes(lowered.compile())


@dataclass(frozen=True)
class Prepared:
    """A beam's arms.

    Attributes:
      arms: by way to verify, packed first.
      leaves: of every draft of every prompt.
      memory: of the arms' programs.
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
    """Arms whose room for leaves is the largest number that any draft has.

    A beam may have depth (width - 1) + 1 leaves and has fewer as a rule. Sequences
    beyond a draft's own leaves are padding that an engine would not compute, so the
    baseline gets as little of it as one compiled program for all drafts can have.
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
    """The record of one prompt and beam: every arm, all turns.

    An arm that runs out of memory has no "seconds".

    Raises:
      RuntimeError: tokens differ from plain decoding's beyond a tie.
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


def measure_unrolled(
    target: Model,
    drafter: Model,
    prompts: dict[str, list[Prompt]],
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    scans: Sequence[Literal["step", "chunk"]],
    max_new_tokens: int,
    run: Run,
) -> dict[str, Any]:
    """Greedy decoding with beam trees of every width and depth, packed and unrolled.

    A unit is a prompt with a beam, "WIDTHxDEPTH/SET/i"; the first prompt goes through
    all beams before the second. Before a beam's first prompt in a process its drafts'
    leaves are counted on all prompts (see `prepare`), again in a process that resumes.

    Args:
      prompts: texts, or token ids, by the name of their set.
      widths, depths: of the beams, the paper's M and N.
      scans: ways to go through an unrolled tree, see `Unrolled`.

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and "results", see
      `summarise_beams`.

    Raises:
      ValueError: a beam without a node.
      RuntimeError: tokens differ from plain decoding's beyond a tie.
    """
    beams = [f"{w}x{d}" for d in depths for w in widths]
    for beam in beams:
        resolve_tree(f"beam:{beam}")
    work = workload(target, drafter, [Arm(PLAIN, None)], prompts, max_new_tokens)
    units = {
        f"{beam}/{title}/{i}": (beam, text)
        for i, groups in enumerate(rounds(prompts))
        for title, (text,) in groups.items()
        for beam in beams
    }
    work_unit = _worker(work, units, scans, run.repeats)
    settings = settings_of("unrolled", {"": (target, drafter)}, prompts) | {
        "widths": list(widths),
        "depths": list(depths),
        "scans": list(scans),
        "max_new_tokens": max_new_tokens,
    }
    report = measure(settings, units, work_unit, run)
    return {**report, "results": summarise_beams(report["units"])}


def _worker(
    work: Workload,
    units: dict[str, tuple[str, Prompt]],
    scans: Sequence[Literal["step", "chunk"]],
    repeats: int,
) -> Callable[[str], dict[str, Any]]:
    """What measures a unit; a beam's arms and a text's plain tokens are made once."""
    [plain_arm], (first, _) = work.arms, next(iter(units.values()))
    texts = [text for beam, text in units.values() if beam == first]
    prepared = cache(lambda beam: prepare(work, beam, scans, texts))
    plain = cache(lambda text: decode_once(work, plain_arm, [text], 0))
    warm: dict[str, set[str]] = {beam: set() for beam, _ in units.values()}

    def work_unit(name: str) -> dict[str, Any]:
        beam, text = units[name]
        arms = prepared(beam)
        return decode_text(work, arms, text, plain(text), repeats, warm[beam])

    return work_unit


def summarise_beams(units: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's rows, from the records of the units that are there.

    Returns:
      a row a set, beam and arm: "set", "width", "depth"; "nodes", 1 + width depth;
      "scan", "packed", "step" or "chunk"; "units", prompts; "tau", of all of them;
      "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", median and quartiles over
      prompts of medians over turns; "ms_per_call", median; "over_packed", median over
      prompts of time over the packed arm's, and "p_packed" of a sign test of it, both
      None for packed; "equal", prompts whose tokens are the packed arm's (others part
      at a tie); "leaves", the most that a draft had and the room that the unrolled
      program has; "leaves_mean", of all drafts; "leaves_bound", depth (width - 1) + 1;
      "states" held; "tokens_per_call" computed, leaves (depth + 1) if unrolled;
      "memory_bytes", "temp_bytes" of the program of the loop, drafter included
      (`compiled_bytes`); "first_call_s", compilation included. Where an arm ran out of
      memory, "units" is 0 and what would have been measured is None.
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
    """Statistics of one way to verify, over the prompts of a set that it was run on."""
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


def unrolled_table(report: dict[str, Any]) -> str:
    """The paper's table for each set and scan, and below them all rows."""
    sections = []
    for title in dict.fromkeys(row["set"] for row in report["results"]):
        rows = [row for row in report["results"] if row["set"] == title]
        for scan in report["scans"]:
            sections += [
                f"{title}, {report['sets'][title]} prompts, {report['max_new_tokens']} "
                f"new tokens: packed / unrolled ({scan}), tokens/s; MB",
                _paper_table(rows, scan),
            ]
    return "\n\n".join([*sections, _detail_table(report["results"])])


def _paper_table(rows: Sequence[dict[str, Any]], scan: str) -> str:
    """Rows are depths N, columns widths M."""
    found = {(row["width"], row["depth"], row["scan"]): row for row in rows}
    widths, depths = (
        sorted({row[name] for row in rows}) for name in ("width", "depth")
    )

    def cell(width: int, depth: int) -> str:
        pair = [found.get((width, depth, name)) for name in (PACKED, scan)]
        if None in pair:
            return "-"
        speeds = " / ".join(
            shown(row["tokens_per_s"], ".1f", OUT_OF_MEMORY) for row in pair if row
        )
        sizes = " / ".join(megabytes(row["memory_bytes"]) for row in pair if row)
        return f"{speeds}; {sizes}"

    return table(
        ["N", *(f"M = {width}" for width in widths)],
        [[f"{depth}", *(cell(width, depth) for width in widths)] for depth in depths],
    )


def _detail_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["set", "M x N", "scan", "tau", "tokens/s (quartiles)", "ms/call"]
    head += ["over packed, p", "equal", "leaves: most (mean, bound)", "states"]
    head += ["tokens/call", "memory, MB", "temporaries, MB"]
    lines = []
    for row in rows:
        over, mean = row["over_packed"], f"{row['leaves_mean']:.1f}"
        cells = [row["set"], f"{row['width']} x {row['depth']}", row["scan"]]
        cells += [shown(row["tau"], ".2f"), with_quartiles(row, "tokens_per_s", ".1f")]
        cells += [shown(row["ms_per_call"], ".2f")]
        cells += ["-" if over is None else f"{over:.2f}, {row['p_packed']:.2g}"]
        cells += [f"{row['equal']}/{row['units']}" if row["units"] else "-"]
        cells += [f"{row['leaves']} ({mean}, {row['leaves_bound']})"]
        cells += [f"{row['states']}", f"{row['tokens_per_call']}"]
        cells += [megabytes(row[name]) for name in ("memory_bytes", "temp_bytes")]
        lines.append(cells)
    return table(head, lines)
