"""Counts the tokens and the bits of log-probabilities in which other ways of decoding
differ from plain decoding of each text alone.

The texts continue pieces of source code. A unit is a few texts, written greedily or
sampled, and every way of decoding them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import method, tables
from bench.kl import text_ids
from bench.method import Run
from stree_jax.checkpoints.load import load
from stree_jax.cli.options import MODEL, MODEL_HELP, add, group
from stree_jax.sampling.settings import Sampling
from stree_jax.speculation.drafters.table import AUTO
from stree_jax.verify import certify

NAME, REPEATS = "bits", 1
LONGEST = 48  # tokens of a prompt
GREEDY, SAMPLED = "greedy", "T = 1"
COUNTS = ("texts", "equal_tokens", "equal_bits", "tokens", "different_bits")


def add_options(b: argparse.ArgumentParser) -> None:
    model = group(b, MODEL)
    add(model, "--model", str, "demo", MODEL_HELP, metavar="MODEL")
    add(model, "--dtype", str, None, "of weights, as for generate (default: as stored)")
    text = "text whose pieces are the prompts (default: source code of this package)"
    add(b, "--text", Path, None, text, metavar="FILE")
    add(b, "--count", int, 16, "prompts; each is continued greedily and sampled")
    add(b, "--batch", int, 8, "prompts of a unit; half as many rows in turn")
    add(b, "--max-new-tokens", int, 256, "tokens of each text")
    trees = "trees as for generate, or random:N, a random tree of N nodes"
    add(b, "--trees", str, ("chain:4", "random:12"), trees, "+", metavar="TREE")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Counts differences, and returns the report. Its "results" have a row for each
    way of decoding, greedy and sampled, with the sums of `Compared`.

    Raises:
      ValueError: an option is wrong, or the text is too short.
    """
    if args.count < 1 or args.batch < 1:
        raise ValueError("--count, --batch: want at least 1")
    model = load(args.model, dtype=args.dtype)
    shapes = {name: certify.shape_of(name) for name in args.trees}
    ids = text_ids(model, args.text, LONGEST * args.count)
    prompts = [_prompt(ids, i) for i in range(args.count)]

    def compared(start: int, kind: str) -> list[dict[str, Any]]:
        several = prompts[start : start + args.batch]
        sampling = None if kind == GREEDY else Sampling(temperature=1.0, seed=start)
        decoding = certify.Run(model, several, args.max_new_tokens, sampling, AUTO)
        return [
            asdict(decoding.compared(way, call))
            for way, call in decoding.ways(shapes, few=True)
        ]

    units = {
        f"{start}/{kind}": partial(compared, start, kind)
        for start in range(0, args.count, args.batch)
        for kind in (GREEDY, SAMPLED)
    }
    settings = method.settings_of(args, "model count batch max_new_tokens trees")
    settings["dtype"] = str(model.weight_format)
    settings["text"] = None if args.text is None else str(args.text)
    report = method.measure(settings, units, run)
    return {**report, "results": summed(report["units"])}


def _prompt(ids: Sequence[int], i: int) -> list[int]:
    """Returns a prompt of 8 to `LONGEST` tokens."""
    place = LONGEST * i
    return list(ids[place : place + 8 + 7 * i % (LONGEST - 7)])


def summed(units: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the sums of all units, by kind and way."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for unit, rows in units.items():
        kind = unit.partition("/")[2]
        for row in rows:
            way = row["way"]
            empty = {"kind": kind, "way": way, "largest": 0.0} | dict.fromkeys(
                COUNTS, 0
            )
            total = found.setdefault((kind, way), empty)
            for name in COUNTS:
                total[name] += row[name]
            total["largest"] = max(total["largest"], row["largest"])
    return [found[key] for key in sorted(found, key=lambda key: key[0] != GREEDY)]


def table(report: dict[str, Any]) -> str:
    """Returns the table, a row per kind and way."""
    columns = [
        ("", "kind"),
        ("way", "way"),
        ("texts", "texts"),
        ("tokens compared", "tokens"),
        ("texts with other tokens", lambda r: r["texts"] - r["equal_tokens"]),
        ("log-probabilities with other bits", "different_bits"),
        ("largest difference", "largest", ".1e"),
    ]
    line = f"{report['model']}, texts of {report['max_new_tokens']} tokens, compared "
    line += "with plain decoding of each alone"
    return f"{line}\n\n{tables.table(columns, report['results'])}"
