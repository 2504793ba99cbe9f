"""`stree-jax bench`: measure, print, write."""

import argparse
import sys

from stree_jax.bench.benchmarks import measure_benchmark, table_of
from stree_jax.bench.figures import draw, draw_text
from stree_jax.bench.method import write_report
from stree_jax.bench.plots import check_matplotlib, save
from stree_jax.bench.report import write_all
from stree_jax.bench.staged import write_html


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for.

    Args:
      args: of `stree_jax.bench.options`.

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
        save(draw(report), args.figure)
        if report.get("text"):
            stem = args.figure.with_suffix("")
            save(draw_text(report), stem.with_name(f"{stem.name}-text"))
            write_html(report, stem.with_name(f"{stem.name}-text.html"))
    if not report["complete"]:
        print("stree-jax: stopped at --minutes; not complete", file=sys.stderr)
    return 0
