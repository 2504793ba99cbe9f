"""`stree-jax plan`: the fastest setup within a memory limit, and its memory by part.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stree_jax.cli.common import notes
from stree_jax.cli.devices import add_mesh_option
from stree_jax.cli.options import (
    CONTEXT_HELP,
    DEVICES,
    DRAFTER_HELP,
    DRAFTING,
    DTYPES,
    MODEL,
    MODEL_HELP,
    OUTPUT,
    WEIGHTS,
    add,
    add_draft_vocabulary,
    group,
)
from stree_jax.common.checks import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from stree_jax.models import Format, ModelConfig
    from stree_jax.sizing.plan import Choice, Planned

NOTES = notes(
    """
Memory is predicted from shapes: nothing is loaded or compiled, unless --check compiles
the best setup and takes the compiler's figure. Speeds use step times that stree-jax
tune has measured on this machine for the same models, batch and context. Without those,
they assume a memory bandwidth, and only their order is meaningful.

With --mesh, --memory and all bytes are those of each device. This machine needs the
devices only for --check.""",
    "stree-jax plan --memory 8GB --batch 4 --context 2048 --queries 20",
)
MAX_TREE_NAME = 40  # characters of a tree's name in the table


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    limit = "memory limit: 8GB (8 x 10^9 bytes), 8GiB (8 x 2^30), 512MB or a number"
    group(p, DEVICES).add_argument(
        "--memory", required=True, metavar="SIZE", help=limit
    )
    add_mesh_option(p)
    model = group(p, MODEL)
    add(model, "--model", str, "demo", MODEL_HELP, metavar="MODEL")
    dtype = "dtype of the weights (default: as stored; bfloat16 if nothing fits so)"
    add(model, "--dtype", str, None, dtype, choices=WEIGHTS)
    drafting = group(p, DRAFTING)
    add(drafting, "--drafter", str, None, DRAFTER_HELP, metavar="DRAFTER")
    add_draft_vocabulary(drafting)
    work = group(p, "Workload")
    add(work, "--batch", int, 1, "sequences decoded together")
    add(work, "--context", int, 2048, CONTEXT_HELP)
    queries = "successive prompts and answers of one sequence that the caches hold"
    add(work, "--queries", int, 1, queries)
    add(work, "--max-new-tokens", int, DEFAULT_NEW_TOKENS, "most tokens of an answer")
    check = "compile the best setup and use the compiler's figure"
    p.add_argument("--check", action="store_true", help=check)
    add_report_options(p)


def add_report_options(p: argparse.ArgumentParser) -> None:
    """Adds --json and --figure, which writes stacked bars of bytes."""
    output = group(p, OUTPUT)
    output.add_argument("--json", action="store_true", help="print one JSON object")
    text = "write PATH.png and PATH.svg: memory by part, as stacked bars"
    add(output, "--figure", Path, None, text)


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.pair import pair_configs
    from stree_jax.cli.figures import write_bytes
    from stree_jax.sizing.plan import plan
    from stree_jax.sizing.units import bytes_named

    memory = bytes_named(args.memory)  # checked before any file is read
    pair = pair_configs(args.model, args.drafter, args.dtype, args.draft_vocab)
    dtypes: Sequence[str | Format] = [pair.weights]
    if args.dtype is None and pair.weights.plain:
        dtypes = DTYPES[DTYPES.index(pair.weights.name) :]
    found = plan(
        pair.target,
        memory,
        drafter=pair.drafter,
        batch=args.batch,
        context=args.context,
        queries=args.queries,
        max_new_tokens=args.max_new_tokens,
        dtypes=dtypes,
        check=args.check,
        mesh=args.mesh,
    )
    if args.figure:
        bars = {str(choice): choice.memory.parts for choice in found.choices}
        title = f"Setups that fit in {args.memory}, fastest first"
        write_bytes(args.figure, title, bars, found.limit)
    print(json.dumps(found.as_json()) if args.json else report(found))
    if args.mesh is not None and not args.json:
        print(division(pair.target, args.mesh), end="")


def division(config: "ModelConfig", mesh: str) -> str:
    """Returns a line that says which parts of a model a mesh does not divide, if there
    are any."""
    from stree_jax.models.sharding.devices import abstract_mesh
    from stree_jax.models.sharding.placement import whole_parts

    names = whole_parts(config, abstract_mesh(mesh))
    return f"\nwhole on every device: {', '.join(names)}\n" if names else ""


def report(found: "Planned") -> str:
    """Returns the best setup, its memory by part, and a table of all that fit."""
    from stree_jax.sizing.units import shown_bytes

    best = found.best
    kind = "measured" if best.measured else "assumed"
    parts = [(name, shown_bytes(n)) for name, n in best.memory.parts.items() if n]
    reserved = best.memory.promised
    of_each = []
    if found.mesh is not None:
        axes = ",".join(f"{name}={size}" for name, size in found.mesh.items())
        copied = shown_bytes(best.copied)
        of_each = [
            f"bytes are those of each device of {axes}; of the target's weights,"
        ]
        of_each += [f"each holds {copied} that are not divided", ""]
    parts += [
        ("total", shown_bytes(best.memory.total)),
        ("total with safety margin", shown_bytes(reserved)),
        ("left of the limit", shown_bytes(found.limit - reserved)),
    ]
    rows = [("drafter", "tree", "tau", "tokens/s", "memory")]
    for choice in found.choices:
        drafter = f"{choice.heads} heads" if choice.heads else choice.drafter
        tree = choice.tree
        if len(tree) > MAX_TREE_NAME:
            tree = f"{tree[: MAX_TREE_NAME - 3]}..."
        speed = f"{choice.tokens_per_s(found.request.batch):.1f}"
        size = shown_bytes(choice.memory.promised)
        rows.append((drafter, tree, f"{choice.tau:.2f}", speed, size))
    return "\n".join(
        [
            f"fastest setup: {best}",
            f"options: {' '.join(options_of(best))}",
            "",
            *of_each,
            *aligned(parts),
            "",
            f"setups that fit in {best.dtype}, fastest first (step times are {kind}):",
            *aligned(rows),
        ]
    )


def options_of(choice: "Choice") -> list[str]:
    """Returns the command-line options with which `generate` uses a setup. Draft models
    and heads are named as in the arguments of `plan`."""
    words = ["--dtype", choice.dtype]
    if choice.drafter in ("lookup", "none"):
        words += ["--drafter", choice.drafter]
    if choice.drafter != "none":
        words += ["--tree", choice.tree]
    return words


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table as lines of text. Columns of names are aligned left, columns of
    numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = len(rows[0]) - (1 if len(rows[0]) == 2 else 3)
    return [
        "  ".join(
            cell.ljust(width) if i < numbers else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
