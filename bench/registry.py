"""The benchmarks by name. A benchmark is a module that is imported when it is used.

Such a module has NAME, REPEATS (the default of `--repeats`) and these functions:
`add_options(parser)`; `measure(args, run)`, which returns a report; `table(report)`,
which returns Markdown; and `figures(report)` where it draws any, by the end of a
file's name. A figure may also be the text of a page.
"""

import argparse
from functools import partial
from importlib import import_module
from typing import Any

from stree_jax.bench.options import add_run_options
from stree_jax.options import Parser

BENCHMARKS = {
    "decode": "plain, chain and trees on prompts (Table 2)",
    "temperature": "acceptance rules against temperature (Fig. 4)",
    "staged": "n-grams that guess for the drafter (Spector and Re, Tables 1 and 2)",
    "heads": "Medusa heads beside other drafters; what typical acceptance does to "
    "texts",
    "memory": "where the bytes go and what fits in few of them (SpecMemo's figures)",
    "trees": "the static trees A to E (Table 3)",
    "attention": "pairs with more and less attention (Table 4)",
    "unrolled": "beam trees packed and unrolled (Table 1)",
    "forward": "one pass against its nodes, packed and unrolled (Fig. 2, 3)",
    "cost": "which tree is fastest here, predicted and measured",
    "profile": "where the time of a step goes, by the device's trace",
    "kernels": "time of the ops by implementation",
    "peers": "llama.cpp and transformers on the same weights",
    "prompts": "reading a prompt against its length, beside transformers",
    "capacity": "one pass against the capacity of its caches and the length of its "
    "text",
    "devices": "what devices of a mesh hold and exchange, from compiled programs",
    "all": "everything, and a report with figures",
}
MODULES = {"prompts": "reading", "all": "everything"}  # where they differ from the name


def load(name: str) -> Any:
    """Returns the module of a benchmark."""
    return import_module(f"stree_jax.bench.{MODULES.get(name, name)}")


def add_options(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds the options of a benchmark."""
    module = load(name)
    if name != "all":
        add_run_options(parser, module.REPEATS)
    module.add_options(parser)


def add_bench_parsers(parser: Parser) -> None:
    """Adds a subcommand for every benchmark; each gets its options when it is used."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    for name, text in BENCHMARKS.items():
        found = benchmarks.add_parser(name, help=text, description=text)
        found.add_options = partial(add_options, name)


def parse_bench(words: list[str]) -> argparse.Namespace:
    """Parses the words after `stree-jax bench`."""
    parser = Parser(prog="stree-jax bench")
    add_bench_parsers(parser)
    return parser.parse_args(words)
