"""`stree-jax info`: the contents of a checkpoint, and the memory that decoding needs.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stree_jax.cli.commands.plan import add_report_options, aligned
from stree_jax.cli.common import notes
from stree_jax.cli.options import (
    CONTEXT_HELP,
    DRAFTING,
    add,
    add_draft_vocabulary,
    group,
)
from stree_jax.cli.text_options import add_keep_option
from stree_jax.common.heap import no_collection

if TYPE_CHECKING:
    from stree_jax.models import Format, ModelConfig

NOTES = notes(
    "Reads configuration and headers only: no weights are loaded or downloaded.",
    "stree-jax info OWNER/NAME",
    "stree-jax info model-Q4_K_M.gguf --context 8192",
    "stree-jax info OWNER/DRAFTER --draft-vocab 32768",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    text = "directory of a model or drafter, GGUF file, hub id, demo or demo-drafter"
    p.add_argument("path", metavar="PATH", help=text)
    work = group(p, "Workload of the memory estimate")
    add(work, "--batch", int, 1, "sequences decoded together")
    add(work, "--context", int, 2048, CONTEXT_HELP)
    add_draft_vocabulary(group(p, DRAFTING))
    add_keep_option(p)
    add_report_options(p)


def run(args: argparse.Namespace) -> None:
    with no_collection():
        from stree_jax.checkpoints.info import drafter_info, info_and_config
        from stree_jax.cli.figures import write_bytes
        from stree_jax.sizing.units import shown_bytes

    described = drafter_info(args.path, args.draft_vocab)
    if described is not None:
        print_drafter(args, described)
        return
    if args.draft_vocab is not None:
        raise ValueError(f"--draft-vocab: {args.path} is a model, not a drafter")
    contents, config, format = info_and_config(args.path)
    decoding = plain_decoding(config, format, args.batch, args.context)
    if args.figure:
        title = f"Plain decoding, {args.batch} x {args.context} tokens"
        write_bytes(args.figure, title, {args.path: decoding["parts"]}, None)
    if args.json:
        print(json.dumps(contents | {"plain_decoding": decoding}))
        return
    print_aligned(contents)
    print(f"\nmemory of plain decoding, {args.batch} x {args.context} tokens")
    parts = [(name, n) for name, n in decoding["parts"].items() if n]
    parts.append(("total", decoding["bytes"]))
    print("\n".join(aligned([(name, shown_bytes(n)) for name, n in parts])))


def print_drafter(args: argparse.Namespace, contents: dict[str, Any]) -> None:
    """Prints a description of a drafter."""
    if args.figure:
        raise ValueError(f"--figure: {args.path} is a drafter, not a model")
    if args.json:
        print(json.dumps(contents))
        return
    if (rows := contents.get("draft_vocab_size")) is not None:
        vocab = contents["vocab_size"]
        some = f"{rows:,} of {vocab:,}" if rows < vocab else f"all {vocab:,}"
        contents = contents | {"draft_vocab_size": f"{some} tokens"}
    print_aligned(contents)


def print_aligned(contents: dict[str, Any]) -> None:
    width = max(len(name) for name in contents)
    for name, value in contents.items():
        print(f"{name:{width}}  {value}")


def plain_decoding(
    config: "ModelConfig", dtype: "Format", batch: int, context: int
) -> dict[str, Any]:
    """Predicts the memory of plain decoding: bytes by part, such as weights and KV
    caches. `stree-jax plan` predicts it for trees and drafters."""
    from stree_jax.sizing.plain import plain_memory
    from stree_jax.sizing.request import Request

    new = max(min(128, context // 2), 1)
    request = Request(batch, context, max_new_tokens=new)
    memory = plain_memory(replace(config, mtp=()), dtype, request.room(0))
    workload = {"batch": batch, "context": context, "bytes": memory.total}
    return workload | {"parts": memory.parts}
