"""Command-line options that several benchmarks share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree_jax.cli.options import MODEL, OUTPUT, add, add_model_options, group

SHAPE = "mamba2-130m"
PAIR = "NAME=TARGET:DRAFTER"
PROMPTS, MEASURING = "Prompts", "Measuring"
DRAFT_MODEL_HELP = (
    "draft model: directory, GGUF file, hub id or demo; decode, temperature and trees "
    "also take MODULE:NAME, a custom drafter (default: demo for --model demo)"
)


def add_run_options(b: argparse.ArgumentParser, repeats: int) -> None:
    """Adds the options that all benchmarks have."""
    measuring = group(b, MEASURING)
    add(measuring, "--repeats", int, repeats, "runs of each arm after its first call")
    add_minutes(b)
    output = group(b, OUTPUT)
    json = "write the report to this file, from which an interrupted run resumes "
    add(output, "--json", Path, None, json + "(default: no report)", metavar="FILE")
    figure = "write PATH.png and PATH.svg (default: no figure)"
    add(output, "--figure", Path, None, figure)


def add_minutes(b: argparse.ArgumentParser) -> None:
    text = "start no further measurement after N minutes (default: no limit)"
    add(group(b, MEASURING), "--minutes", float, None, text, metavar="N")


def add_prompts(
    b: argparse.ArgumentParser,
    count: int,
    needed: bool = True,
    without: str = "random ones, with --shape",
) -> None:
    """Adds the options of a pair of models and of the prompts that it decodes.

    Args:
      b: the parser.
      count: default number of prompts per file.
      needed: if True, --prompts is required.
      without: for the help, the prompts that are used without --prompts.
    """
    add_model_options(b, drafter_help=DRAFT_MODEL_HELP)
    wide = "pad the target with zeros to 4 or 16 times its width: same text, more work"
    add(group(b, MODEL), "--widen", int, 1, wide)
    prompts = group(b, PROMPTS)
    files = ".jsonl or .jsonl.gz files with a prompt, turns or question on each line"
    files += "" if needed else f" (default: {without})"
    prompts.add_argument(
        "--prompts", type=Path, nargs="+", required=needed, metavar="FILE", help=files
    )
    add(prompts, "--count", int, count, "prompts of each file")
    text = "new tokens per prompt; stop tokens are ignored"
    add(prompts, "--max-new-tokens", int, 128, text)


def add_arms(
    b: argparse.ArgumentParser,
    default: Sequence[str],
    what: str = "TREE, RULE@TREE or lookup",
) -> None:
    text = f"setups to measure beside plain decoding: {what}"
    add(group(b, MEASURING), "--arms", str, default, text, "+", metavar="ARM")


def add_temperatures(b: argparse.ArgumentParser, default: Sequence[float]) -> None:
    text = "sampling temperatures; 0 is greedy"
    add(group(b, MEASURING), "--temperatures", float, default, text, "+")


def add_batch(b: argparse.ArgumentParser, what: str = "prompts") -> None:
    add(group(b, MEASURING), "--batch", int, 1, f"{what} decoded together")
