"""Chooses the tokens that a drafter with a smaller head can draft."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from stree_jax.common.checks import integer, shown, with_hints
from stree_jax.convert.drafters.kept import with_rows
from stree_jax.convert.tokenizers.whole_texts import for_whole_texts
from stree_jax.models import Model, ModelConfig
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig
from stree_jax.models.drafters.eagle import Eagle, EagleConfig
from stree_jax.models.drafters.trimming import (
    TRIMMED,
    trimmed,
    trimmed_config,
    trimmed_eagle,
    trimmed_eagle_config,
)
from stree_jax.speculation.drafters.mtp import (
    MTP,
    TrimmedMTP,
    TrimmedMTPConfig,
    trimmed_mtp,
)
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.speculation.drafters.table import AUTO, DrafterConfig, default_drafter

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
    target: Model, count: int, text: str | Sequence[int] | None = None
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


def _encoded(target: Model, text: str | Sequence[int] | None) -> np.ndarray:
    """Returns the tokens of a text; empty without a text."""
    if isinstance(text, str):
        if target.tokenizer is None:
            raise ValueError("text: this model has no tokenizer.json; pass token ids")
        whole = for_whole_texts(target.tokenizer)
        text = whole.encode(text, add_special_tokens=False).ids
    return np.asarray([] if text is None else text, np.int64)


@with_hints
def with_draft_vocabulary(
    drafter: Any, target: Model, ids: Any
) -> DFlash | WithNGrams | Eagle | TrimmedMTP:
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
    if isinstance(drafter, DFlash):
        return trimmed(drafter, target, ids)
    if isinstance(drafter, WithNGrams):
        return replace(drafter, drafter=trimmed(drafter.drafter, target, ids))
    if isinstance(drafter, Eagle):
        return trimmed_eagle(drafter, target, ids)
    if isinstance(drafter, str) and drafter == MTP:
        if not target.config.mtp:
            raise ValueError("drafter: the target has no MTP layers")
        return trimmed_mtp(target, ids)
    raise unsupported(drafter)


def unsupported(drafter: Any) -> ValueError:
    """Returns the error for a drafter whose head cannot be trimmed."""
    return ValueError(
        "draft vocabulary: for MTP layers, EAGLE and block drafters (DFlash, DFlash2, "
        f"DSpark) only, got {shown(drafter)}"
    )


def narrowed(drafter: Any, target: Model, vocabulary: DraftVocabulary) -> Any:
    """Returns a drafter with a draft vocabulary."""
    ids = draft_vocabulary(target, *vocabulary)
    return with_draft_vocabulary(drafter, target, ids)


def narrowed_config(drafter: Any, target: ModelConfig, count: int, kept: Any) -> Any:
    """Returns the architecture of a drafter with a draft vocabulary.

    Args:
      drafter: "mtp", or the `DrafterConfig` of a block or EAGLE drafter.
      target: the target's architecture.
      count: number of tokens.
      kept: format of the target's weights.
    """
    what = f"1..{target.num_tokens} tokens"
    count = integer("draft vocabulary", count, 1, target.num_tokens, what)
    if isinstance(drafter, str) and drafter == MTP:
        return DrafterConfig(TrimmedMTPConfig(target, count), kept)
    config = getattr(drafter, "config", drafter)
    if not isinstance(drafter, DrafterConfig):
        raise unsupported(config)
    if isinstance(config, DFlashConfig):
        own = trimmed_config(config, count, target.logits_divisor)
        kept_rows = with_rows(drafter.kept, TRIMMED, own.head_rows)
        return DrafterConfig(own, kept_rows)
    if isinstance(config, EagleConfig):
        return drafter._replace(config=trimmed_eagle_config(config, count))
    raise unsupported(config)
