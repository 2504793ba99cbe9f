"""`generate --earlier`: texts from which prompt lookup drafts."""

import argparse

from stree_jax.cli.common import print_status
from stree_jax.convert.base.files import check_readable
from stree_jax.convert.tokenizers.tokenizer import encoding
from stree_jax.generation.generate import Options
from stree_jax.models import Model
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.drafters.earlier import MOST_TOKENS, EarlierTexts

MOST_BYTES = 16 * MOST_TOKENS  # of a file; the last MOST_TOKENS are rarely longer


def earlier_answers(args: argparse.Namespace) -> list[str]:
    """Reads the texts of --earlier; without it, there are none.

    Raises:
      ValueError: the file is missing, damaged, empty or too large, or nothing drafts
        from it.
    """
    if args.earlier is None:
        return []
    from stree_jax.training.texts import Tally, read_texts

    if args.drafter == "none":
        raise ValueError("--earlier: --drafter none drafts nothing; leave one out")
    if args.earlier.is_dir():
        raise ValueError(f"--earlier: {args.earlier}: want a file, got a folder")
    tally = Tally()
    try:
        found = read_texts([args.earlier], tally)
        check_readable(args.earlier, MOST_BYTES)
        texts = [text for text in found if text.strip()]
    except (ValueError, OSError) as error:
        raise ValueError(f"--earlier: {error}") from error
    if tally.latin:
        raise ValueError(f"--earlier: {args.earlier}: not UTF-8 text")
    if not texts:
        raise ValueError(f"--earlier: {args.earlier}: contains no text")
    return texts


def earlier_tokens(target: Model, texts: list[str], drafting: Options) -> EarlierTexts:
    """Returns texts as tokens; if they are too many, the last ones.

    Args:
      target: the target model, with a tokenizer.
      texts: the texts, the newest last.
      drafting: the drafter, tree and rule.

    Raises:
      ValueError: the drafter does not use prompt lookup.
    """
    how = drafting["drafter"], drafting["tree"], drafting["rule"]
    if drafting["drafter"] is None or not spec_for(target, *how, None).drafter.looks_up:
        raise ValueError(
            "--earlier: only prompt lookup drafts from earlier answers; use --drafter "
            "lookup or --tree auto"
        )
    tokenizer = target.tokenizer
    assert tokenizer is not None  # checked by `load_models`
    with encoding("--earlier"):
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [one.ids for one in found]
    if (count := sum(len(row) + 1 for row in ids)) > MOST_TOKENS:
        print_status(
            f"stree-jax: --earlier: {count} tokens; the last {MOST_TOKENS} are used"
        )
    return EarlierTexts.of(ids)
