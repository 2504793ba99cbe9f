"""The texts that mark reasoning and tool calls, which may be special tokens."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from stree_jax.server.chat_format import ChatFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TAIL = 16  # tokens at the end of a prompt that may begin the reasoning


@lru_cache(maxsize=8)
def showing(tokenizer: "Tokenizer", marks: frozenset[str]) -> "Tokenizer":
    """Returns a tokenizer that decodes the special tokens in some texts, which decoding
    otherwise leaves out. It is the same tokenizer if there are none. A copy of a large
    vocabulary takes a second; it is cached."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    shown = {name for name in special if any(name in mark for mark in marks)}
    if not shown:
        return tokenizer
    from tokenizers import Tokenizer

    fields = json.loads(tokenizer.to_str())
    for token in fields["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in shown
    copy = Tokenizer.from_str(json.dumps(fields))
    copy.encode_special_tokens = tokenizer.encode_special_tokens  # not in the JSON
    return copy


def ends_in_reasoning(
    form: ChatFormat, tokenizer: "Tokenizer", ids: Sequence[int]
) -> bool:
    """True if a prompt ends with the text before reasoning.

    Args:
      form: the format of the chat template.
      tokenizer: the model's tokenizer.
      ids: the tokens of the prompt.
    """
    if form.reasoning is None:
        return False
    tail = tokenizer.decode(list(ids[-TAIL:]), skip_special_tokens=False)
    return tail.rstrip().endswith(form.reasoning[0].rstrip())
