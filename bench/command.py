"""`stree-jax bench`: measure, print the table, write the report and the figures."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench.method import Run, check_report, machine_line, write_report
from bench.registry import load
from stree_jax.cli.figures import check_matplotlib, save


def run(args: argparse.Namespace) -> int:
    """Runs a benchmark.

    Args:
      args: as `bench.registry.parse_bench` returns them.

    Returns:
      the exit code.

    Raises:
      ValueError: the options contradict each other, or a package is missing.
    """
    module = load(args.benchmark)
    if hasattr(module, "run"):
        module.run(args)
        return 0
    if args.figure is not None:  # checked before anything is measured
        if not hasattr(module, "figures"):
            raise ValueError(f"--figure: bench {args.benchmark} draws no figure")
        check_matplotlib()
    report = measure(args)
    if args.json is not None:
        write_report(report, args.json)
    print(table_of(report))
    if args.figure is not None:
        save_figures(report, args.figure)
    if not report["complete"]:
        message = "stree-jax: stopped at --minutes; the report is not complete"
        print(message, file=sys.stderr)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report of a benchmark. A value that is given twice is measured once.

    Raises:
      ValueError: the options are wrong, and nothing has been measured.
    """
    for name, value in vars(args).items():
        if isinstance(value, list):
            setattr(args, name, list(dict.fromkeys(value)))
    return load(args.benchmark).measure(args, run_of(args))


def run_of(args: argparse.Namespace) -> Run:
    """Returns how to measure. Raises ValueError for wrong options."""
    positive = "repeats batch max_new_tokens sizes capacities lengths"
    for name in positive.split():
        values = getattr(args, name, 1)
        for value in (values,) if isinstance(values, int) else values:
            if value < 1:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option}: want at least 1, got {value}")
    if args.minutes is not None and not args.minutes >= 0:
        raise ValueError(f"--minutes: want at least 0, got {args.minutes}")
    if args.json is not None:
        check_report(args.json)
    for name in ("json", "figure"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: {path.parent}: no such directory")
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise ValueError(f"--{name}: {path.parent}: cannot be written to")
    return Run(args.repeats, args.json, args.minutes)


def table_of(report: dict[str, Any]) -> str:
    """Returns the report as Markdown, followed by a line about the machine."""
    return f"{load(report['kind']).table(report)}\n\n{machine_line(report)}"


def save_figures(report: dict[str, Any], path: Path) -> None:
    """Writes the figures and pages of a report, with names that begin with `path`."""
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    for end, figure in load(report["kind"]).figures(report).items():
        whole = stem.with_name(stem.name + end)
        if isinstance(figure, str):
            whole.write_text(figure, "utf-8")
        else:
            save(figure, whole)
