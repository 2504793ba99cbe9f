"""Chooses the tokens that a drafter with a smaller head can draft."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stree_jax.checkpoints.kinds.table import KINDS, kind_of_value
from stree_jax.common.checks import integer, shown, with_hints
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.models import Model
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter, default_drafter

MIN_COVERAGE = 0.97  # share of a text's tokens; below it, a warning is given


class DraftVocabulary(NamedTuple):
    """The options of a draft vocabulary.

    Attributes:
      size: number of tokens.
      text: a text whose most frequent tokens are used, or None.
    """

    size: int
    text: str | None = None


@with_hints
def draft_vocabulary(
    target: Model, count: int, text: str | Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """Chooses the tokens that are worth drafting.

    The target's stop tokens and the tokenizer's special tokens are always among them.
    Warns if the others miss more than 3 % of the text.

    Args:
      target: the target model.
      count: number of tokens.
      text: a text like those to be written, best the target's own answers, or its
        tokens. Its most frequent tokens are chosen. If None, and after the tokens of
        the text, the tokens with the lowest ids are chosen: in most tokenizers these
        are frequent.

    Returns:
      [count] int32, the tokens in ascending order.

    Raises:
      ValueError: the text cannot be encoded, or the number is out of range.
    """
    V = target.config.num_tokens
    always = _always(target)
    least = len(always) + 1
    what = f"{least}..{V} tokens, with the {len(always)} stop and special tokens"
    count = integer("draft vocabulary", count, least, V, what)
    ids = _encoded(target, text)
    counts = np.bincount(ids, minlength=V)[:V]
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, always)]
    chosen = np.sort(np.concatenate([always, others[: count - len(always)]]))
    coverage = counts[chosen].sum() / max(counts.sum(), 1)
    if len(ids) and coverage < MIN_COVERAGE:
        warnings.warn(
            f"draft vocabulary: {count} tokens are {coverage:.1%} of the text's; the "
            f"others are never drafted; {MIN_COVERAGE:.0%} or more is better",
            stacklevel=2,
        )
    return chosen.astype(np.int32)


def _always(target: Model) -> np.ndarray:
    """Returns the stop tokens and special tokens, in ascending order."""
    V, found = target.config.num_tokens, set(target.config.stop_tokens)
    if target.tokenizer is not None:
        found |= {
            i
            for i, token in target.tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
    return np.array(sorted(i for i in found if 0 <= i < V), np.int64)


def _encoded(target: Model, text: Any) -> np.ndarray:
    """Returns the tokens of a text; empty without a text."""
    if isinstance(text, str):
        if target.tokenizer is None:
            raise ValueError("text: this model has no tokenizer.json; pass token ids")
        whole = for_whole_texts(target.tokenizer)
        text = whole.encode(text, add_special_tokens=False).ids
    return np.asarray([] if text is None else text, np.int64)


@with_hints
def with_draft_vocabulary(drafter: Any, target: Model, ids: Any) -> AnyDrafter:
    """Returns a drafter that drafts only some of the tokens, and so reads less memory.

    The output of decoding does not change.

    Args:
      drafter: a block drafter, an EAGLE drafter, "mtp", or "auto" for a target with MTP
        layers.
      target: the target model.
      ids: the tokens, as from `draft_vocabulary`.

    Raises:
      ValueError: the drafter is of another kind, a token is outside the vocabulary, or
        the head of an EAGLE drafter has no more tokens.
    """
    ids = np.unique(np.asarray(ids, np.int32))
    V = target.config.num_tokens
    if not len(ids) or not 0 <= ids[0] <= ids[-1] < V:
        raise ValueError(f"ids: want tokens in 0..{V - 1}")
    if isinstance(drafter, str) and drafter == AUTO:
        drafter = default_drafter(target.config)
    kind = kind_of_value(drafter)
    if kind is None or not kind.can_trim:
        raise unsupported(drafter)
    return kind.trimmed(drafter, target, ids)


def unsupported(drafter: Any) -> ValueError:
    """Returns the error for a drafter whose head cannot be trimmed."""
    kinds = ", ".join(k.kind.name for k in KINDS if k.kind.can_trim)
    return ValueError(f"draft vocabulary: for {kinds} only, got {shown(drafter)}")
