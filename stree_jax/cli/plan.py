"""`stree-jax plan`: what decodes fastest in so many bytes, and where they go.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stree_jax.checks import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from stree_jax.sizing.plan import Planned

NOTES = """
Bytes are predicted from shapes, without loading or compiling anything; --check compiles
what was chosen and takes the compiler's word. tokens_per_s goes by steps measured here
where stree-jax tune was run for the pair, batch and context, and else by the bytes that
a step reads, at a bandwidth that is assumed: then only its order says something."""
# In this order, from the stored one on; int8 only if it is named.
DTYPES = ["float32", "bfloat16"]
WIDEST = 40  # characters of a tree's name in the table

# Writes a figure: its path, its title, bytes by part of each bar, and the limit.
Draw = Callable[[Path, str, Mapping[str, Mapping[str, int]], int | None], None]


def add_plan_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    p.add_argument(
        "--memory", required=True, help="bytes: 8GB, 8GiB, 512MB or a number"
    )
    p.add_argument(
        "--model", default="demo", help="directory, GGUF file, hub id or demo"
    )
    p.add_argument(
        "--drafter",
        help="directory or hub id of a model or of Medusa heads, demo, demo-heads, a "
        "file of n-grams, lookup, mtp or none; default: as of generate",
    )
    p.add_argument(
        "--dtype",
        choices=[*DTYPES, "int8"],
        help="of the weights; default: as stored, and bfloat16 if nothing fits in that",
    )
    for name, default, text in (
        ("--batch", 1, "rows decoded together"),
        ("--context", 2048, "tokens of a query, its prompt and its answer"),
        ("--queries", 1, "that a row's caches keep, one after another"),
        ("--max-new-tokens", DEFAULT_NEW_TOKENS, "of an answer"),
    ):
        text = f"{text}; default %(default)s"
        p.add_argument(name, type=int, default=default, help=text)
    p.add_argument(
        "--check", action="store_true", help="compile what fits, and believe that"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_figure_option(p)


def add_figure_option(p: argparse.ArgumentParser) -> None:
    """`Draw` is given its path."""
    text = "write FIGURE.png and FIGURE.svg: the bytes by part, stacked"
    p.add_argument("--figure", type=Path, help=text)


def run_plan(args: argparse.Namespace, draw: Draw) -> None:
    from stree_jax.pair import pair_configs
    from stree_jax.sizing.plan import plan
    from stree_jax.sizing.units import bytes_named

    memory = bytes_named(args.memory)  # before anything is read
    pair = pair_configs(args.model, args.drafter)
    found = plan(
        pair.target,
        memory,
        drafter=pair.drafter,
        batch=args.batch,
        context=args.context,
        queries=args.queries,
        max_new_tokens=args.max_new_tokens,
        dtypes=[args.dtype] if args.dtype else DTYPES[DTYPES.index(pair.dtype) :],
        check=args.check,
    )
    if args.figure:
        bars = {str(choice): choice.memory.parts for choice in found.choices}
        title = f"What fits in {args.memory}, the fastest first"
        draw(args.figure, title, bars, found.limit)
    print(json.dumps(found.as_json()) if args.json else report(found))


def report(found: "Planned") -> str:
    """Returns the report: what to run, where the bytes go, and what else fits."""
    from stree_jax.sizing.units import shown_bytes

    best, asked = found.best, found.request
    kind = "measured" if best.measured else "assumed"
    parts = [(name, shown_bytes(n)) for name, n in best.memory.parts.items() if n]
    sure = best.memory.promised
    parts += [
        ("in all", shown_bytes(best.memory.total)),
        ("with what is not foreseen", shown_bytes(sure)),
        ("left", shown_bytes(found.limit - sure)),
    ]
    rows = [("drafter", "tree", "tau", "tokens/s", "bytes")]
    for choice in found.choices:
        drafter = f"{choice.heads} heads" if choice.heads else choice.drafter
        tree = choice.tree
        if len(tree) > WIDEST:
            tree = f"{tree[: WIDEST - 3]}..."
        speed = f"{choice.tokens_per_s(asked.batch):.1f}"
        size = shown_bytes(choice.memory.promised)
        rows.append((drafter, tree, f"{choice.tau:.2f}", speed, size))
    return "\n".join(
        [
            f"{best}: --tree {best.tree}" if best.drafter != "none" else str(best),
            "",
            *aligned(parts),
            "",
            f"what fits in {best.dtype}, the fastest first (times are {kind}):",
            *aligned(rows),
        ]
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: names on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = len(rows[0]) - (1 if len(rows[0]) == 2 else 3)
    return [
        "  ".join(
            cell.ljust(width) if i < numbers else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
