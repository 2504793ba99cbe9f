"""`stree-jax ngrams`: counts the n-grams of a draft model."""

import argparse
import dataclasses
from pathlib import Path

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import OUTPUT, SAMPLING, add, group
from stree_jax.cli.training import add_required

NOTES = notes(
    """
generate, chat, tune and serve use the file: with --ngrams FILE it proposes tokens for
the draft model that it was counted from, which then needs fewer forward passes for the
same draft; with --drafter FILE it is the drafter itself. For a DFlash drafter, count
the text of its target (here --drafter TARGET). With --ngrams FILE the n-grams then say
which tokens follow each other.""",
    "stree-jax ngrams --drafter SMALL --out ngrams.safetensors",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_required(
        p,
        "--drafter",
        str,
        "MODEL",
        "draft model to sample text from (for a DFlash drafter, its target): "
        "directory, GGUF file, hub id or demo",
    )
    add_required(p, "--out", Path, "FILE", "file to create; must not exist", OUTPUT)
    sampling = group(p, SAMPLING)
    text = "tokens of text to learn from, sampled from the draft model"
    add(sampling, "--tokens", int, 10_000_000, text)
    text = "sampling temperature; higher values reach more contexts"
    add(sampling, "--temperature", float, 1.5, text)
    add(sampling, "--batch", int, 256, "sequences sampled together")
    add(sampling, "--seed", int, 0, "seed of the random numbers")
    table = group(p, "Size of the table")
    add(table, "--order", int, 3, "tokens of an n-gram, 2 to 8")
    text = "most contexts of one length, a power of two"
    add(table, "--slots", int, 2**18, text)
    text = "most next tokens stored for a context"
    add(table, "--next-tokens", int, 8, text, dest="keep")


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.drafters import save_drafter
    from stree_jax.checkpoints.kinds.ngrams import check_new
    from stree_jax.checkpoints.load import load
    from stree_jax.training.ngrams import Recipe, ngrams_of

    check_new(args.out)  # fail now, and not after counting n-grams, which takes hours
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(args, name) for name in names})
    drafter = load("demo-drafter" if args.drafter == "demo" else args.drafter)
    ngrams = ngrams_of(drafter, recipe)
    save_drafter(ngrams, args.out)
    print_status(f"wrote {args.out}: {ngrams}")
