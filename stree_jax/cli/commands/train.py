"""`stree-jax train`: trains a small hybrid model."""

import argparse
from pathlib import Path

from stree_jax.cli.common import notes
from stree_jax.cli.options import add, group
from stree_jax.cli.training import (
    MODEL_SIZE,
    RESUME_NOTES,
    TEXT_NOTES,
    add_training_options,
    job_of,
)

NOTES = notes(
    TEXT_NOTES + RESUME_NOTES,
    "stree-jax train --text FOLDER --out my-model --work my-model-run",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_training_options(p, steps=3600, learning_rate=2e-3)
    size = group(p, MODEL_SIZE)
    add(size, "--width", int, 384, "model width (d_model), a multiple of 128")
    text = "mixer layers, each followed by an MLP"
    add(size, "--mixers", int, 6, text)
    add(size, "--attention", int, 2, "how many of the mixers are attention layers")
    text = "the other mixers: Mamba2, or Gated DeltaNet in a model like Qwen3.5"
    add(size, "--recurrent", str, "mamba", text, choices=("mamba", "delta"))
    text = "train an MTP layer too, which drafts with --drafter mtp; only with "
    text += "--recurrent delta"
    size.add_argument("--mtp", action="store_true", help=text)
    text = "tokenizer.json to use (default: train a tokenizer)"
    add(size, "--tokenizer", Path, None, text, metavar="FILE")
    add(size, "--vocab-size", int, 2048, "entries of the tokenizer to train")


def run(args: argparse.Namespace) -> None:
    from stree_jax.training import recipe

    size = recipe.TargetSize(
        args.width, args.mixers, args.attention, args.recurrent, args.mtp
    )
    recipe.train_target(job_of(args), size, args.tokenizer, args.vocab_size)
