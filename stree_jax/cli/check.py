"""`stree-jax check-drafter`: how often a drafter agrees with its target on a text.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes
from stree_jax.options import OUTPUT, add, add_model_options, group

if TYPE_CHECKING:
    from stree_jax.agreement import Agreement

NOTES = notes(
    """
Both models read the text; nothing is generated. At every place of it, the drafter
drafts one token per level, and the table says how often the draft is the target's most
probable token, where the drafts before it are the text's own. A drafter and a target
that belong together agree on 60 to 90 % of the first drafts in the kind of text that
the drafter was trained for (the target's own answers, in its chat template); a mistake
in reading the drafter leaves 10 to 60 %. For block drafters the command also tries the
usual mistakes, and says if one of them agrees better.""",
    "stree-jax check-drafter --model OWNER/MODEL --drafter OWNER/NAME --text chat.txt",
)
LEVELS, NODES = 7, 16
BETTER = 0.1  # a reading that agrees this much more often is probably the right one


def add_check_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_model_options(p, dtype=None)
    text = "UTF-8 text to read, best an answer of the target"
    p.add_argument("--text", type=Path, required=True, metavar="FILE", help=text)
    add(p, "--tokens", int, 512, "most tokens of the text")
    add(p, "--levels", int, LEVELS, "most levels of the drafts")
    output = group(p, OUTPUT)
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run_check(args: argparse.Namespace) -> None:
    from stree_jax.convert.files import read_text
    from stree_jax.generation import encode_prompts
    from stree_jax.pair import load_pair

    if args.tokens < 2 or args.levels < 1:
        raise ValueError("want --tokens of 2 or more and --levels of 1 or more")
    text = read_text(args.text)
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    ids = encode_prompts(target, [text])[0][: args.tokens] if text else []
    if len(ids) < 2:
        raise ValueError(f"{args.text}: want at least 2 tokens of text")
    report = check(target, drafter, ids, args.levels)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{report['tokens']} tokens; drafter: {report['drafter']}\n")
    print("draft  agrees  places")
    for level, (share, count) in enumerate(report["by_position"], 1):
        if count:
            print(f"{level:5}  {share:6.1%}  {count:6}")
    print(f"\ntokens per pass on this text: chain {report['chain']:.2f}")
    if report["tree"]:
        print(f"  with the best tree of {NODES} nodes {report['tree']:.2f}")
    for name, share in report["readings"].items():
        print(f"read {name}: first drafts agree {share:.1%}")
    if report["better"]:
        print(f"warning: read {report['better']}, the drafter agrees much better; its")
        print("config seems to be wrong, or it belongs to another target")


def check(target: Any, drafter: Any, ids: Sequence[int], levels: int) -> dict[str, Any]:
    """Returns the figures of the command.

    Args:
      target: the target model.
      drafter: as in `generate`.
      ids: the tokens of the text.
      levels: most levels of the drafts.
    """
    from stree_jax.agreement import agreement
    from stree_jax.models.dflash import DFlash
    from stree_jax.speculation.drafters.dflash import readings
    from stree_jax.speculation.drafters.table import source_of
    from stree_jax.speculation.tree import Budget

    source = source_of(drafter, target.config)
    depth = min(levels, source.search_size[1])
    chain = agreement(target, drafter, ids, f"chain:{depth}")
    tree, others = 0.0, {}
    if isinstance(source.value, DFlash):
        tree = agreement(target, drafter, ids, Budget(NODES, depth)).tau()
        for name, other in readings(source.value, target.config).items():
            others[name] = _first(agreement(target, other, ids, "chain:1"))
    best = max(others, key=lambda name: others[name], default=None)
    better = best is not None and others[best] > _first(chain) + BETTER
    named = source.name if isinstance(source.value, str) else repr(source.value)
    return {
        "tokens": len(ids),
        "drafter": named,
        "by_position": chain.by_position(),
        "chain": chain.tau(),
        "tree": tree,
        "readings": others,
        "better": best if better else None,
    }


def _first(found: "Agreement") -> float:
    """Returns how often first drafts agree."""
    return found.by_position()[0][0]
