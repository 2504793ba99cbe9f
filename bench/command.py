"""`stree-jax bench`: measure, print, write."""

import argparse
import sys
from pathlib import Path
from typing import Any

from stree_jax.bench.benchmarks import measure_benchmark, table_of
from stree_jax.bench.budget_figures import draw_parts
from stree_jax.bench.charts import check_matplotlib, save
from stree_jax.bench.everything import write_all
from stree_jax.bench.figures import draw, draw_text
from stree_jax.bench.method import write_report
from stree_jax.bench.staged import write_html


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for.

    Args:
      args: of `stree_jax.options`.

    Raises:
      ValueError: options that do not go together, or a package that is missing.
    """
    if args.benchmark == "all":
        write_all(args)
        return 0
    if args.figure is not None:
        check_matplotlib()  # before anything is measured
    report = measure_benchmark(args)
    if args.json is not None:
        write_report(report, args.json)
    print(table_of(report))
    if args.figure is not None:
        _save_figures(report, args.figure)
    if not report["complete"]:
        print("stree-jax: stopped at --minutes; not complete", file=sys.stderr)
    return 0


def _save_figures(report: dict[str, Any], path: Path) -> None:
    """The figure of a report, or one a part, and texts by their origins."""
    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    if report["kind"] == "memory":
        for part, figure in draw_parts(report).items():
            save(figure, stem.with_name(f"{stem.name}-{part}"))
        return
    save(draw(report), path)
    if report.get("text"):
        save(draw_text(report), stem.with_name(f"{stem.name}-text"))
        write_html(report, stem.with_name(f"{stem.name}-text.html"))
