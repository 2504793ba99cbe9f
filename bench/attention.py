"""Measures decoding with models that have more or less attention (STree, Table 4)."""

import argparse
from collections.abc import Sequence
from typing import Any

from bench import decode
from bench.method import Run
from bench.options import PAIR, add_arms, add_prompts, add_temperatures
from bench.widen import widened
from stree_jax.checkpoints.load import load
from stree_jax.models import Model

NAME, REPEATS = "attention", 2
ARMS = ["leviathan@chain:4", "mss@A"]
table, figures = decode.table, decode.figures


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    pairs = "model directories, by what the tables call them"
    b.add_argument("--pairs", nargs="+", required=True, metavar=PAIR, help=pairs)
    add_arms(b, ARMS)
    add_temperatures(b, (1,))


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    pairs = named_pairs(args.pairs, args.dtype, args.widen)
    return decode.measure_pairs(pairs, args, run)


def named_pairs(
    specs: Sequence[str], dtype: str, widen: int
) -> dict[str, tuple[Model, Model]]:
    """Loads the models of "NAME=TARGET:DRAFTER", by name."""
    pairs = {}
    for spec in specs:
        name, _, paths = spec.partition("=")
        target, _, drafter = paths.partition(":")
        if not (name and target and drafter) or "/" in name:
            raise ValueError(f"--pairs: want NAME=TARGET:DRAFTER, got {spec!r}")
        wide = widened(load(target, dtype=dtype), widen)
        pairs[name] = wide, load(drafter, dtype=dtype)
    return pairs
