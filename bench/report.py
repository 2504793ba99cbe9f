"""`stree-jax bench all`: every kind with its defaults, and a report with figures."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from stree_jax.bench.figures import check_matplotlib, draw, save
from stree_jax.bench.kinds import measure_kind, table_of
from stree_jax.bench.method import Clock, machine, write_report

TITLES = {
    "decode": "Plain, chain and trees on prompts (STree, Table 2)",
    "temperature": "Acceptance rules against temperature (Fig. 4)",
    "trees": "Static trees (Table 3)",
    "attention": "More and less attention (Table 4)",
    "unrolled": "Beam trees packed and unrolled (Table 1)",
    "forward": "One pass against its nodes (Fig. 2 and 3)",
    "cost": "Which tree is fastest here, predicted and measured (section 4)",
}


def arguments(args: argparse.Namespace, kind: str) -> argparse.Namespace:
    """The options of one kind: its defaults, and what `bench all` was given."""
    from stree_jax.cli.main import build_parser

    words = ["bench", kind, "--json", str(args.out / f"{kind}.json")]
    if kind == "forward":
        words += ["--shape", args.shape]
    else:
        words += ["--model", args.model, "--dtype", args.dtype]
        words += ["--drafter", args.drafter] if args.drafter else []
        words += ["--prompts", *map(str, args.prompts), "--count", str(args.count)]
        words += ["--max-new-tokens", str(args.max_new_tokens)]
        words += ["--widen", str(args.widen)]
    if kind == "attention":
        words += ["--pairs", *args.pairs]
    return build_parser().parse_args(words)


def write_all(args: argparse.Namespace) -> None:
    """Measure what is not there yet, then write REPORT.md and the figures.

    A kind whose complete report is in the folder, made by this commit on this machine,
    is not measured again.
    """
    check_matplotlib()
    args.out.mkdir(exist_ok=True)
    clock, sections = Clock(args.minutes), ["# Measurements\n"]
    for kind, title in TITLES.items():
        if kind == "attention" and not args.pairs:
            continue
        report = _finished(args.out / f"{kind}.json")
        if report is None and not clock.over:
            options = arguments(args, kind)
            options.minutes = None if args.minutes is None else clock.left / 60
            print(f"bench {kind}", file=sys.stderr)
            report = measure_kind(options)
            # Programs of all kinds together exhaust a process's memory maps.
            jax.clear_caches()
            write_report(report, options.json)
        if report is None:
            sections.append(f"## {title}\n\nNot measured: the time was over.\n")
            continue
        save(draw(report), args.out / kind)
        sections.append(f"## {title}\n\n![{title}]({kind}.png)\n\n{table_of(report)}\n")
        (args.out / "REPORT.md").write_text("\n".join(sections))
    print(f"wrote {args.out / 'REPORT.md'}")


def _finished(path: Path) -> dict[str, Any] | None:
    """A complete report of this commit and machine, if there is one."""
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    return report if report["complete"] and report["machine"] == machine() else None
