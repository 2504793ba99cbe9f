"""`stree-jax check-drafter`: how often a drafter agrees with its target on a text.

Imports nothing heavy before it runs: --help is fast.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree_jax.cli.common import notes
from stree_jax.cli.options import OUTPUT, add, add_model_options, group

if TYPE_CHECKING:
    from stree_jax.verify.agreement import Agreement

NOTES = notes(
    """
Both models read the text; nothing is generated. At every place of it, the drafter
drafts one token per level, and the table says how often the draft is the target's most
probable token, where the drafts before it are the text's own. A drafter and a target
that belong together agree on 60 to 90 % of the first drafts in the kind of text that
the drafter was trained for (the target's own answers, in its chat template); a mistake
in reading the drafter leaves 10 to 60 %. For published drafters and MTP layers the
command also tries the usual mistakes and says if one of them agrees better.""",
    "stree-jax check-drafter --model OWNER/MODEL --drafter OWNER/NAME --text chat.txt",
)
LEVELS, NODES = 7, 16
# If another way to read the drafter's files (`Source.readings`) increases the expected
# number of right tokens among the first two draft tokens by more than this, it is
# probably the right way.
BETTER = 0.1


def add_options(p: argparse.ArgumentParser) -> None:
    p.epilog = NOTES
    add_model_options(p, dtype=None)
    text = "UTF-8 text to read, best an answer of the target"
    p.add_argument("--text", type=Path, required=True, metavar="FILE", help=text)
    add(p, "--tokens", int, 512, "most tokens of the text")
    add(p, "--levels", int, LEVELS, "most levels of the drafts")
    output = group(p, OUTPUT)
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from stree_jax.checkpoints.pair import load_pair
    from stree_jax.convert.base.files import read_text
    from stree_jax.generation.generate import encode_prompts

    if args.tokens < 2 or args.levels < 1:
        raise ValueError("want --tokens of 2 or more and --levels of 1 or more")
    text = read_text(args.text)
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if drafter is None:
        raise ValueError("--drafter: none proposes nothing; name a drafter to check")
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
    for name, shares in report["readings"].items():
        print(f"read {name}: {_shown(shares)}")
    if report["better"]:
        print(f"warning: read {report['better']}, the drafter agrees much better; its")
        print("config seems to be wrong, or it belongs to another target")


def _shown(shares: list[float]) -> str:
    names = zip(("first", "second"), shares, strict=False)
    return ", ".join(f"{name} drafts agree {share:.1%}" for name, share in names)


def check(target: Any, drafter: Any, ids: Sequence[int], levels: int) -> dict[str, Any]:
    """Measures how often a drafter's tokens are the target's on a text. Returns the
    report that the command prints with `--json`.

    Args:
      target: the target model.
      drafter: as in `generate`.
      ids: token ids of the text.
      levels: maximum number of draft tokens in a row.
    """
    from stree_jax.speculation.drafters.table import source_of
    from stree_jax.speculation.tree import Budget
    from stree_jax.verify.agreement import agreement

    source = source_of(drafter, target.config)
    depth = min(levels, source.search_size[1])
    chain = agreement(target, drafter, ids, f"chain:{depth}")
    tree, short = 0.0, f"chain:{min(depth, 2)}"
    if source.one_pass:
        tree = agreement(target, drafter, ids, Budget(NODES, depth)).tau()
    others = {
        name: _shares(agreement(target, other, ids, short))
        for name, other in source.readings(target).items()
    }
    best = max(others, key=lambda name: _right(others[name]), default=None)
    better = best is not None and _right(others[best]) > _right(_shares(chain)) + BETTER
    named = source.name if isinstance(source.value, str) else repr(source.value)
    return {
        "tokens": len(ids),
        "drafter": named,
        "kind": source.kind,
        "by_position": chain.by_position(),
        "chain": chain.tau(),
        "tree": tree,
        "readings": others,
        "better": best if better else None,
    }


def _shares(found: "Agreement") -> list[float]:
    """Returns how often the first and the second draft token agree with the target.
    Only the first one if drafts have one token."""
    return [share for share, _ in found.by_position()[:2]]


def _right(shares: list[float]) -> float:
    """Returns the expected number of right draft tokens before the first wrong one.

    Args:
      shares: how often each draft token agrees with the target.
    """
    return sum(math.prod(shares[:n]) for n in range(1, len(shares) + 1))
