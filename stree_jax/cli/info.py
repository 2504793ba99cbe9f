"""`stree-jax info`: what a checkpoint holds, and the bytes of decoding with it.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import option
from stree_jax.cli.plan import Draw, add_figure_option, aligned

if TYPE_CHECKING:
    from stree_jax.models import ModelConfig


def add_info_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("path", help="directory, GGUF file, hub id, demo or demo-drafter")
    option(p, "--batch", int, 1, "rows of the plain decoding whose bytes are shown")
    option(p, "--context", int, 2048, "its tokens, prompt and answer")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    add_figure_option(p)


def run_info(args: argparse.Namespace, draw: Draw) -> None:
    from stree_jax.checkpoints.info import info_and_config
    from stree_jax.sizing.units import shown_bytes

    facts, config = info_and_config(args.path)
    decoding = plain_decoding(config, facts["dtype"], args.batch, args.context)
    if args.figure:
        title = f"Plain decoding, {args.batch} x {args.context} tokens"
        draw(args.figure, title, {args.path: decoding["parts"]}, None)
    if args.json:
        print(json.dumps(facts | {"plain_decoding": decoding}))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    print(f"\nbytes of plain decoding, {args.batch} x {args.context} tokens")
    parts = [(name, n) for name, n in decoding["parts"].items() if n]
    parts.append(("in all", decoding["bytes"]))
    print("\n".join(aligned([(name, shown_bytes(n)) for name, n in parts])))


def plain_decoding(
    config: "ModelConfig", dtype: str, batch: int, context: int
) -> dict[str, Any]:
    """Predicts the bytes of plain decoding by part; `stree-jax plan` does so for trees,
    drafters and limits."""
    from stree_jax.models import without_mtp
    from stree_jax.sizing.memory import abstract_model, memory_of
    from stree_jax.sizing.plan import Request

    new = max(min(128, context // 2), 1)
    request = Request(batch, context, max_new_tokens=new)
    model = without_mtp(abstract_model(config, dtype))
    memory = memory_of(model, None, "chain:0", request.room(0))
    facts = {"batch": batch, "context": context, "bytes": memory.total}
    return facts | {"parts": memory.parts}
