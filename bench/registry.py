"""The benchmarks by name. Each is a module that is imported when it is used.

Such a module has NAME, REPEATS (the default of `--repeats`) and these functions:
`add_options(parser)`; `measure(args, run)`, which returns a report; `table(report)`,
which returns Markdown; and optionally `figures(report)`, which returns figures by the
end of their file's name. A figure can also be the text of a page. A module that returns
no report has `add_options(parser)` and `run(args)`, and no REPEATS.
"""

import argparse
from functools import partial
from importlib import import_module
from typing import Any

from bench.options import add_run_options
from stree_jax.cli.options import Parser

BENCHMARKS = {
    "decode": "plain decoding, chains and trees on prompts (STree, Table 2)",
    "temperature": "acceptance rules by temperature (STree, Fig. 4)",
    "trees": "the static trees A to E (STree, Table 3)",
    "attention": "pairs with more and less attention (STree, Table 4)",
    "unrolled": "beam trees, packed and unrolled (STree, Table 1)",
    "forward": "one forward pass by its number of nodes (STree, Fig. 2 and 3)",
    "cost": "which tree is fastest on this machine, predicted and measured",
    "breakeven": "the acceptance from which speculation pays, from measured passes",
    "heads": "Medusa heads compared with other drafters, and typical acceptance",
    "drafters": "drafters compared: agreement, trees at equal nodes, decoding",
    "staged": "n-grams that propose tokens for the draft model (Spector and Re 2023)",
    "memory": "memory by part, and what fits in a limit (SpecMemo's figures)",
    "prompts": "prefill by prompt length, compared with transformers",
    "capacity": "one forward pass by the capacity of its caches and the text length",
    "profile": "where the time of a decoding step goes, from the device's trace",
    "kernels": "time of each op by implementation",
    "gradient": "memory of log-probabilities and their gradient, as compiled",
    "devices": "what the devices of a mesh hold and exchange, from compiled programs",
    "earlier": "drafts from the answers to earlier, similar requests",
    "schemas": "JSON that follows a schema, plain and speculative",
    "peers": "decoding throughput compared with llama.cpp and transformers",
    "start": "from a command to its first tokens, compared with llama.cpp",
    "servers": "the HTTP server compared with llama.cpp's",
    "bits": "tokens and bits that differ from plain decoding, over many texts",
    "kl": "next-token distributions by dtype, compared with the exact ones",
    "all": "the benchmarks of STree's tables and figures, and a report",
    "records": "print a record of earlier measurements",
}
MODULES = {"prompts": "reading", "all": "everything"}  # modules with another name


def load(name: str) -> Any:
    """Returns the module of a benchmark."""
    return import_module(f"bench.{MODULES.get(name, name)}")


def add_options(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds the options of a benchmark."""
    module = load(name)
    if hasattr(module, "REPEATS"):
        add_run_options(parser, module.REPEATS)
    module.add_options(parser)


def add_bench_parsers(parser: Parser) -> None:
    """Adds a command for every benchmark, which gets its options when it is used."""
    benchmarks = parser.add_subparsers(
        prog=parser.prog,
        dest="benchmark",
        required=True,
        title="benchmarks",
        metavar="BENCHMARK",
    )
    for name, text in BENCHMARKS.items():
        description = f"{text[0].upper()}{text[1:]}."
        found = benchmarks.add_parser(
            name, help=text, description=description, usage="%(prog)s [options]"
        )
        found.add_options = partial(add_options, name)


def parse_bench(words: list[str]) -> argparse.Namespace:
    """Parses the words after `stree-jax bench`."""
    parser = Parser(prog="stree-jax bench")
    add_bench_parsers(parser)
    return parser.parse_args(words)
