"""Command-line options that several benchmarks share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree_jax.options import add, add_model_options

SHAPE = "mamba2-130m"
PAIR = "NAME=TARGET:DRAFTER"


def add_run_options(b: argparse.ArgumentParser, repeats: int) -> None:
    """Adds the options that all benchmarks have."""
    add(b, "--repeats", int, repeats, "turns of each arm after its first call")
    json = "write the report here; a killed run resumes (default: nowhere)"
    b.add_argument("--json", type=Path, help=json)
    figure = "write FIGURE.png and FIGURE.svg (default: no figure)"
    b.add_argument("--figure", type=Path, help=figure)
    add_minutes(b)


def add_minutes(b: argparse.ArgumentParser) -> None:
    text = "begin nothing new after so many (default: no limit)"
    b.add_argument("--minutes", type=float, help=text)


def add_prompts(
    b: argparse.ArgumentParser,
    count: int,
    needed: bool = True,
    without: str = "random ones, with --shape",
) -> None:
    """Adds the options of a pair of models and of the prompts that it decodes."""
    add_model_options(b)
    files = ".jsonl[.gz] files, a prompt, turns or question a line"
    files += "" if needed else f" (default: {without})"
    b.add_argument("--prompts", type=Path, nargs="+", required=needed, help=files)
    add(b, "--count", int, count, "prompts per file")
    add(b, "--max-new-tokens", int, 128, "tokens per prompt; no text ends before")
    wide = "the target among zeros, 4 or 16 times as wide: same text, more work"
    add(b, "--widen", int, 1, wide)


def add_arms(
    b: argparse.ArgumentParser,
    default: Sequence[str],
    what: str = "TREE, RULE@TREE or lookup",
) -> None:
    add(b, "--arms", str, default, what, "+")


def add_temperatures(b: argparse.ArgumentParser, default: Sequence[float]) -> None:
    add(b, "--temperatures", float, default, "of sampling; 0 is greedy", "+")


def add_batch(b: argparse.ArgumentParser, what: str = "prompts") -> None:
    add(b, "--batch", int, 1, f"{what} decoded together")
