"""`stree-jax certify`: compares speculative with plain decoding on this machine.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes, print_status
from stree_jax.cli.options import OUTPUT, add, add_model_options, group

if TYPE_CHECKING:
    from stree_jax.verify.certify import Certificate

NOTES = notes(
    """
Every text is decoded plainly first, alone. The other ways get drafts that are partly
right, so that paths of every kind are accepted and rejected: trees, tree auto with the
drafter, batches whose texts begin together or in turn, a text continued by a second
call, and the scores of the finished text. The table counts the texts with equal tokens,
and those whose log-probabilities are equal, too, bit for bit. The exit code is 1 if
tokens differ, or with --bits also if a bit does.""",
    "stree-jax certify --model model-Q4_K_M.gguf",
    "stree-jax certify --model OWNER/NAME --prompts prompts.txt --json > found.json",
)


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_model_options(p, dtype=None)
    text = "UTF-8 file with a prompt on each line (default: four short ones)"
    add(p, "--prompts", Path, None, text, metavar="FILE")
    add(p, "--max-new-tokens", int, 64, "tokens of each text")
    add(p, "--seeds", int, (0,), "seeds of the texts at temperature 1", "*")
    trees = "trees as for generate, or random:N, a random tree of N nodes"
    add(p, "--trees", str, ("chain:4", "E", "random:24"), trees, "*", metavar="TREE")
    output = group(p, OUTPUT)
    output.add_argument(
        "--bits", action="store_true", help="exit with 1 if log-probabilities differ"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import jax

    from stree_jax import cpu_kernels
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.common.version import __version__
    from stree_jax.convert.base.files import read_text
    from stree_jax.verify.certify import PROMPTS, certify

    prompts = list(PROMPTS)
    if args.prompts is not None:
        prompts = [line for line in read_text(args.prompts).splitlines() if line]
        if not prompts:
            raise ValueError(f"{args.prompts}: no prompts")
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if target.tokenizer is None:
        raise ValueError(f"{args.model}: no tokenizer, so it cannot read text")
    found = certify(
        target,
        prompts,
        max_new_tokens=args.max_new_tokens,
        drafter=drafter,
        trees=args.trees,
        seeds=args.seeds,
        say=None if args.json else lambda way: print_status(f"stree-jax: {way}"),
    )
    machine = {
        "model": args.model,
        "dtype": str(target.weight_format),
        "device": jax.devices()[0].device_kind,
        "cpu_kernels": cpu_kernels.describe(),
        "jax": jax.__version__,
        "stree_jax": __version__,
    }
    if args.json:
        print(json.dumps(machine | found.as_json()))
    else:
        print(table(found))
        print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    return int(not (found.equal_bits if args.bits else found.equal_tokens))


def table(found: "Certificate") -> str:
    """Returns the comparisons as lines of text, and a summary."""
    heads = "way", "", "equal tokens", "equal bits", "largest difference", "tokens/pass"
    rows: list[tuple[Any, ...]] = [heads]
    for c in found.compared:
        length = c.acceptance_length
        rows.append(
            (
                c.way,
                c.kind,
                f"{c.equal_tokens} of {c.texts}",
                f"{c.equal_bits} of {c.texts}",
                f"{c.largest:.1e}" if c.largest else "0",
                "-" if length is None else f"{length:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    texts = sum(c.texts for c in found.compared)
    same = sum(c.equal_tokens for c in found.compared)
    bits = sum(c.equal_bits for c in found.compared)
    lines += [
        "",
        f"{same} of {texts} texts have the tokens of plain decoding, and {bits} its "
        "log-probabilities, bit for bit.",
    ]
    gaps = [c.gap for c in found.compared if c.gap is not None]
    if gaps:
        lines.append(
            f"Where tokens differ, their logits differ by at most {max(gaps):.1e}: a "
            "gap within rounding is a tie."
        )
    if found.layer is not None:
        lines.append(f"The first layer whose bits differ: {found.layer}.")
    return "\n".join(line.rstrip() for line in lines)
