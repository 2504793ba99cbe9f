"""`stree-jax heads`: trains Medusa heads."""

import argparse

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import DTYPES, add, group
from stree_jax.cli.training import (
    TEXT_NOTES,
    TRAINING,
    add_target,
    add_template_option,
    add_training_options,
    job_of,
    speller,
)

NOTES = notes(
    TEXT_NOTES
    + """
The target processes --tokens of the text once. Its hidden states are stored in --work
(2 bytes per channel and token), and the heads are trained on them. The same command
resumes from the newest save. generate and chat use the heads with --drafter OUT.""",
    "stree-jax heads --target PATH --text FOLDER --out my-heads --work my-run",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_target(p)
    add_training_options(p, steps=2000, learning_rate=2e-3, batch=16, length=128)
    size = group(p, "Size of the heads")
    add(size, "--heads", int, 4, "number of heads: future tokens predicted in parallel")
    add(size, "--blocks", int, 3, "residual blocks of each head")
    text = "an output matrix for each head (default: all share the target's)"
    size.add_argument("--own-output", action="store_true", help=text)
    training = group(p, TRAINING)
    add(training, "--tokens", int, 2_000_000, "tokens of --text to learn from")
    text = "tokens of text that the target writes itself, to learn from as well"
    add(training, "--own-tokens", int, 400_000, text)
    text = "dtype of the target during training"
    add(group(p, "Target"), "--dtype", str, "float32", text, choices=DTYPES)
    add_template_option(p)


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.training.heads import train_heads

    size = args.heads, args.blocks, args.own_output
    heads = train_heads(
        job_of(args, speller(args)),
        args.target,
        *size,
        tokens=args.tokens,
        own_tokens=args.own_tokens,
        dtype=args.dtype,
    )
    save_drafter(heads, args.out, args.target)
    print_status(f"wrote {args.out}: {heads}")
