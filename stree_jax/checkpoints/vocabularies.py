"""Checks that the token ids of a drafter mean the same as those of the target.

A drafter may have fewer or more tokens than its target, because models with the same
tokenizer pad their embeddings to different multiples. `Distribution` cuts or extends
its logits. If ids mean other tokens, the output is still exact, but few draft tokens
are accepted.
"""

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def warn_of_other_tokens(
    name: str, target: Any, tokens: int, tokenizer: "Tokenizer | None"
) -> None:
    """Warns in one line if a drafter has other tokens than the target.

    Args:
      name: name of the argument that holds the drafter.
      target: the target model.
      tokens: size of the drafter's vocabulary.
      tokenizer: the drafter's tokenizer, or None.
    """
    own = target.tokenizer
    if own is not None and tokenizer is not None:
        problem = _difference(own, tokenizer)
    elif tokens != target.config.num_tokens:
        problem = (
            f"its vocabulary has {tokens} tokens, the target's "
            f"{target.config.num_tokens}, and there are no tokenizers to compare"
        )
    else:
        return
    if problem is not None:
        warnings.warn(
            f"{name}: {problem}; the output is unaffected, but unless both models use "
            "one tokenizer few draft tokens will be accepted",
            stacklevel=2,
        )


@lru_cache(maxsize=8)  # comparing large vocabularies takes 0.1 s
def _difference(target: "Tokenizer", drafter: "Tokenizer") -> str | None:
    """Describes the ids that stand for different tokens, or returns None.

    Ids that are special tokens in both may differ, as in a base model and its chat
    model: they hardly occur in text.
    """
    if target is drafter:
        return None
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in drafter.get_vocab().items()}
    both = ours.keys() & theirs.keys()
    special = _special_ids(target) & _special_ids(drafter)
    other = sorted(i for i in both - special if ours[i] != theirs[i])
    if not other:
        return None
    i = other[0]
    return (
        f"its tokenizer differs from the target's in {len(other)} of {len(both)} "
        f"tokens ({i} is {theirs[i]!r:.40}, the target's {i} is {ours[i]!r:.40})"
    )


def _special_ids(tokenizer: "Tokenizer") -> set[int]:
    added = tokenizer.get_added_tokens_decoder()
    return {i for i, token in added.items() if token.special}
