"""`stree-jax convert`: a checkpoint becomes a directory of this library."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import DTYPES, KEPT, add, add_adapter

NOTES = notes("", "stree-jax convert OWNER/NAME my-model", "stree-jax info my-model")


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_paths(p, "checkpoint directory, GGUF file or hub id", [*DTYPES, KEPT])
    p.add_argument(
        "--dt-floor",
        action="store_true",
        help="Nemotron-H and Zamba2: raise dt to at least time_step_min, as "
        "transformers does",
    )
    p.add_argument(
        "--verify",
        action="store_true",
        help="compare the logits with those of transformers; exit code 1 if a "
        "difference exceeds 1e-4 of the largest logit",
    )


def add_paths(
    p: argparse.ArgumentParser,
    src: str,
    choices: Sequence[str] = DTYPES,
    dst: str = "directory to create",
) -> None:
    """Adds the source and destination of a conversion, and the dtype to write."""
    p.add_argument("src", metavar="SRC", help=src)
    p.add_argument("dst", type=Path, metavar="DST", help=f"{dst}; must not exist")
    text = "dtype of the written weights (default: bfloat16 stays bfloat16, quantized "
    text += "weights become bfloat16, all else float32)"
    if KEPT in choices:
        text += "; kept writes quantized weights as they are, to be loaded at once"
    add(p, "--dtype", str, None, text, choices=choices)
    add_adapter(p)


def run(args: argparse.Namespace) -> int:
    from stree_jax.checkpoints.resolve import adapter_path, resolve
    from stree_jax.convert import convert_checkpoint
    from stree_jax.verify import parity

    src, dst = resolve(args.src), args.dst
    if args.verify and args.adapter is not None:
        raise ValueError(
            "--verify: compares the model without --adapter; leave one out"
        )
    if args.verify:
        parity.check_verifiable(src)  # before the conversion, which takes long
    convert_checkpoint(
        src,
        dst,
        dtype=args.dtype,
        dt_floor=args.dt_floor,
        warn=lambda text: print_status(f"stree-jax: warning: {text}"),
        adapter=adapter_path(args.adapter),
    )
    print_status(f"wrote {dst}")
    if not args.verify:
        return 0
    difference = parity.largest_difference(src, dst, args.dt_floor)
    print_status(str(difference))
    return 0 if difference.relative <= parity.LIMIT else 1  # NaN is 1
