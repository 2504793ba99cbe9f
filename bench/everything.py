"""`stree-jax bench all`: every benchmark with its default options, and one report."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from bench.command import measure, save_figures, table_of
from bench.method import Clock, machine, write_report
from bench.options import PAIR, SHAPE, add_minutes, add_prompts
from bench.registry import parse_bench
from stree_jax.cli.figures import check_matplotlib
from stree_jax.cli.options import add

NAME = "all"
TITLES = {
    "decode": "Plain, chain and trees on prompts (STree, Table 2)",
    "temperature": "Acceptance rules against temperature (Fig. 4)",
    "trees": "Static trees (Table 3)",
    "attention": "More and less attention (Table 4)",
    "unrolled": "Beam trees packed and unrolled (Table 1)",
    "forward": "One pass against its nodes (Fig. 2 and 3)",
    "cost": "Which tree is fastest here, predicted and measured (section 4)",
}


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    out = "folder of the report; a killed run resumes"
    b.add_argument("--out", type=Path, required=True, help=out)
    add(b, "--shape", str, SHAPE, "of the model in `forward`, random weights")
    pairs = "for `attention` (default: it is left out)"
    b.add_argument("--pairs", nargs="*", default=[], metavar=PAIR, help=pairs)
    add_minutes(b)


def arguments(args: argparse.Namespace, benchmark: str) -> argparse.Namespace:
    """Returns the arguments of one benchmark: the options of `bench all`, and defaults
    for its other options."""
    words = [benchmark, "--json", str(args.out / f"{benchmark}.json")]
    if benchmark == "forward":
        words += ["--shape", args.shape]
    else:
        words += ["--model", args.model, "--dtype", args.dtype]
        words += ["--drafter", args.drafter] if args.drafter else []
        words += ["--prompts", *map(str, args.prompts), "--count", str(args.count)]
        words += ["--max-new-tokens", str(args.max_new_tokens)]
        words += ["--widen", str(args.widen)]
    if benchmark == "attention":
        words += ["--pairs", *args.pairs]
    return parse_bench(words)


def run(args: argparse.Namespace) -> None:
    """Runs the benchmarks whose reports are missing, then writes REPORT.md and the
    figures.

    A benchmark is not run again if its complete report is in the folder and was
    made by this commit on this machine.
    """
    check_matplotlib()
    args.out.mkdir(exist_ok=True)
    clock, sections = Clock(args.minutes), ["# Measurements\n"]
    for benchmark, title in TITLES.items():
        if benchmark == "attention" and not args.pairs:
            continue
        report = _finished(args.out / f"{benchmark}.json")
        if report is None and not clock.over:
            options = arguments(args, benchmark)
            options.minutes = None if args.minutes is None else clock.left / 60
            print(f"bench {benchmark}", file=sys.stderr)
            report = measure(options)
            # Programs of all benchmarks together exhaust a process's memory maps.
            jax.clear_caches()
            write_report(report, options.json)
        text = "Not measured: the time was over."
        if report is not None:
            save_figures(report, args.out / benchmark)
            text = f"![{title}]({benchmark}.png)\n\n{table_of(report)}"
        sections.append(f"## {title}\n\n{text}\n")
        (args.out / "REPORT.md").write_text("\n".join(sections))
    print(f"wrote {args.out / 'REPORT.md'}")


def _finished(path: Path) -> dict[str, Any] | None:
    """Returns the complete report of this commit and machine, or None."""
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    return report if report["complete"] and report["machine"] == machine() else None
