"""`stree-jax bench all`: every benchmark by default options, and one report."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from stree_jax.bench.benchmarks import measure_benchmark, table_of
from stree_jax.bench.charts import check_matplotlib, save
from stree_jax.bench.figures import draw
from stree_jax.bench.method import Clock, machine, write_report
from stree_jax.options import parse_bench

TITLES = {
    "decode": "Plain, chain and trees on prompts (STree, Table 2)",
    "temperature": "Acceptance rules against temperature (Fig. 4)",
    "trees": "Static trees (Table 3)",
    "attention": "More and less attention (Table 4)",
    "unrolled": "Beam trees packed and unrolled (Table 1)",
    "forward": "One pass against its nodes (Fig. 2 and 3)",
    "cost": "Which tree is fastest here, predicted and measured (section 4)",
}


def arguments(args: argparse.Namespace, benchmark: str) -> argparse.Namespace:
    """The options of one benchmark: its defaults, and what `bench all` was given."""
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


def write_all(args: argparse.Namespace) -> None:
    """Measure what is not there yet, then write REPORT.md and the figures.

    A benchmark whose complete report is in the folder, made by this commit on this
    machine, is not measured again.
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
            report = measure_benchmark(options)
            # Programs of all benchmarks together exhaust a process's memory maps.
            jax.clear_caches()
            write_report(report, options.json)
        text = "Not measured: the time was over."
        if report is not None:
            save(draw(report), args.out / benchmark)
            text = f"![{title}]({benchmark}.png)\n\n{table_of(report)}"
        sections.append(f"## {title}\n\n{text}\n")
        (args.out / "REPORT.md").write_text("\n".join(sections))
    print(f"wrote {args.out / 'REPORT.md'}")


def _finished(path: Path) -> dict[str, Any] | None:
    """A complete report of this commit and machine, if there is one."""
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    return report if report["complete"] and report["machine"] == machine() else None
