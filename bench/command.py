"""`stree-jax bench`: its options, and what each kind runs, prints and writes."""

import argparse
import sys
from pathlib import Path
from typing import Any

from stree_jax.bench.options import add_pair_options

# Imports beyond the package's own (jax, matplotlib) stay inside the functions.
TEMPERATURES = (0, 0.25, 0.5, 0.75, 1.0)


def add_bench_parsers(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True)

    def kind(name: str, text: str, repeats: int) -> argparse.ArgumentParser:
        b = kinds.add_parser(name, help=text)
        b.add_argument("--repeats", type=int, default=repeats, help="turns of each arm")
        b.add_argument(
            "--json", type=Path, help="write the figures here; a killed run resumes"
        )
        b.add_argument("--figure", type=Path, help="write FIGURE.png and FIGURE.svg")
        b.add_argument("--minutes", type=float, help="begin nothing new after so long")
        return b

    def prompts(b: argparse.ArgumentParser, count: int, needed: bool = True) -> None:
        add_pair_options(b)
        b.add_argument(
            "--prompts", type=Path, nargs="+", required=needed, help=".jsonl[.gz]"
        )
        b.add_argument("--count", type=int, default=count, help="prompts per file")
        b.add_argument("--max-new-tokens", type=int, default=128)
        b.add_argument(
            "--widen",
            type=int,
            default=1,
            metavar="4|16",
            help="the target among zeros, so many times as wide: same text, more work",
        )

    b = kind("decode", "plain, chain and trees on prompts (Table 2)", 3)
    prompts(b, 20)
    b.add_argument("--arms", nargs="+", help="TREE or RULE@TREE")
    b.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    b.add_argument(
        "--transformers", action="store_true", help="its plain decoding, greedy, too"
    )
    b = kind("temperature", "acceptance rules against temperature (Fig. 4)", 2)
    prompts(b, 8)
    b.add_argument("--arms", nargs="+", help="TREE or RULE@TREE")
    b.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    b.add_argument("--batch", type=int, default=1)
    b = kind("trees", "the static trees A to E (Table 3)", 2)
    prompts(b, 10)
    b.add_argument("--arms", nargs="+", help="TREE or RULE@TREE")
    b.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    b = kind("attention", "pairs with more and less attention (Table 4)", 2)
    prompts(b, 10)
    b.add_argument(
        "--pairs",
        nargs="+",
        required=True,
        metavar="NAME=TARGET:DRAFTER",
        help="model directories by what the tables call them",
    )
    b.add_argument("--arms", nargs="+", help="TREE or RULE@TREE")
    b.add_argument("--temperatures", type=float, nargs="+", default=[1])
    b = kind("unrolled", "beam trees packed and unrolled (Table 1)", 2)
    prompts(b, 10, needed=False)
    b.add_argument(
        "--shape", help="random weights of this target's shape, and random prompts"
    )
    b.add_argument("--drafter-shape", default="mamba2-130m", help="with --shape")
    b.add_argument("--widths", type=int, nargs="+", default=[2, 3, 4, 5])
    b.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16])
    b.add_argument("--scans", nargs="+", choices=["step", "chunk"], default=["step"])
    b = kind(
        "forward", "one pass against its nodes, packed and unrolled (Fig. 2, 3)", 20
    )
    b.add_argument("--shape", default="mamba2-130m")
    b.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 13, 16, 32, 64])
    b.add_argument("--levels", type=int, nargs="*", default=[4, 5, 6], help="binary")
    b.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    b = kind("cost", "which tree is fastest here, predicted and measured", 5)
    prompts(b, 10)
    b.add_argument("--arms", nargs="+", help="TREE or RULE@TREE")
    b = kind("profile", "where the time of a step goes, by the device's trace", 5)
    prompts(b, 1)
    b.add_argument("--arms", nargs="+", help="plain or TREE")
    b = kind("kernels", "time of the ops by implementation", 20)
    b.add_argument("--batch", type=int, nargs="+", default=[1])
    b.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64])
    b.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    b = kinds.add_parser("all", help="everything, and a report with figures")
    prompts(b, 10)
    b.add_argument(
        "--out", type=Path, required=True, help="folder; a killed run resumes"
    )
    b.add_argument("--shape", default="mamba2-130m", help="for `forward`")
    b.add_argument("--pairs", nargs="*", default=[], metavar="NAME=TARGET:DRAFTER")
    b.add_argument("--minutes", type=float, help="begin nothing new after so long")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    from stree_jax.bench import kinds
    from stree_jax.bench.method import write_report

    if args.kind == "all":
        from stree_jax.bench.report import write_all

        write_all(args)
        return 0
    if args.figure is not None:
        from stree_jax.bench.figures import check_matplotlib

        check_matplotlib()  # before anything is measured
    report = kinds.measure_kind(args)
    if args.json is not None:
        write_report(report, args.json)
    print(kinds.table_of(report))
    if args.figure is not None:
        from stree_jax.bench.figures import draw, save

        save(draw(report), args.figure)
    if not report["complete"]:
        print("stree-jax: stopped at --minutes; not complete", file=sys.stderr)
    return 0


def run_of(args: argparse.Namespace) -> Any:
    """How to measure, from the options."""
    from stree_jax.bench.method import Run

    if args.repeats < 1:
        raise ValueError(f"--repeats: want at least 1, got {args.repeats}")
    for name in ("json", "figure"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: {path.parent}: no such directory")
    return Run(args.repeats, args.json, args.minutes)
