"""`stree-jax export`: a model becomes a Hugging Face directory or a GGUF file."""

import argparse

from stree_jax.cli.commands.convert import add_paths
from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import GGUF_TYPES, add

NOTES = notes(
    "",
    "stree-jax export my-model my-model-hf --dtype bfloat16",
    "stree-jax export my-model my-model.gguf --type q4_k",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    dst = "directory to create, or GGUF file if the name ends in .gguf"
    add_paths(p, "model directory, GGUF file or hub id", dst=dst)
    text = (
        "type of the matrices in a GGUF file (default: bf16 for bfloat16 weights, f32 "
    )
    text += "for others that are not quantized); a head in q4_0 and q4_k files is q6_k"
    add(p, "--type", str, None, text, choices=GGUF_TYPES)


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.info import described
    from stree_jax.checkpoints.load import load
    from stree_jax.checkpoints.resolve import resolve
    from stree_jax.convert.export import export_hf

    to_gguf = args.dst.suffix.lower() == ".gguf"
    _check_options(args, to_gguf)
    src = resolve(args.src)
    opened = described(src, args.adapter)
    if to_gguf:
        from stree_jax.cli.chat import read_chat_template
        from stree_jax.convert.export_gguf import export_gguf

        template = read_chat_template(opened.files)
        export_gguf(opened, args.dst, args.type, template, warn=_warn)
    else:
        dtype = args.dtype or opened.exported_dtype()
        mtp = bool(opened.config.mtp)
        model = load(src, dtype=dtype, mtp=mtp, adapter=args.adapter)
        export_hf(model.config, model.params, model.tokenizer, args.dst, source=src)
    print_status(f"wrote {args.dst}")


def _check_options(args: argparse.Namespace, to_gguf: bool) -> None:
    from stree_jax.convert.tensors.gguf_header import SHARD

    if to_gguf and args.dtype is not None:
        raise ValueError("--dtype: of a directory; the option of a GGUF file is --type")
    if to_gguf and SHARD.fullmatch(args.dst.name):
        raise ValueError(f"{args.dst}: the name of a part; one whole file is written")
    if not to_gguf and args.type is not None:
        raise ValueError(f"--type: {args.dst} does not end in .gguf; see --dtype")


def _warn(text: str) -> None:
    print_status(f"stree-jax: warning: {text}")
