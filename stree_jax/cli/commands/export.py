"""`stree-jax export`: a model becomes a Hugging Face directory."""

import argparse

from stree_jax.cli.commands.convert import add_paths
from stree_jax.cli.common import notes, print_status

NOTES = notes("", "stree-jax export my-model my-model-hf --dtype bfloat16")


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_paths(p, "model directory")


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.info import described
    from stree_jax.checkpoints.load import load
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert.export import export_hf

    src = resolve(args.src)
    opened = described(src, args.adapter)
    dtype = args.dtype or opened.exported_dtype()
    mtp = bool(opened.config.mtp)
    model = load(src, dtype=dtype, mtp=mtp, adapter=args.adapter)
    export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    print_status(f"wrote {args.dst}")
