"""Past answers of each API key, from which prompt lookup drafts later answers.

Drafts never change an answer. They can make it faster, so that texts of one key must
not speed up the requests of another: every row has only the texts of its own key.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stree_jax.speculation.drafters.earlier import EarlierTexts

# Tokens of a prompt that are kept before its answer, so that the start of the answer
# can be found. The rest of the prompt is in the prompts of similar requests, too.
CONTEXT = 64


class PastAnswers:
    """The newest answers of each API key, in a limited number of tokens."""

    def __init__(self, size: int) -> None:
        """Keeps nothing yet.

        Args:
          size: E, tokens for each key. If 0, nothing is kept.
        """
        self._empty = EarlierTexts.of([], capacity=size) if size else None
        self._by_owner: dict[int, EarlierTexts] = {}

    def row(self, owner: int) -> jax.Array | None:
        """Returns the answers of a key, [1, E] int32, as `init_decoding` takes them; or
        None if nothing is kept."""
        found = self._by_owner.get(owner, self._empty)
        return None if found is None else jnp.asarray(found.tokens[None])

    def add(self, owner: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keeps an answer, which may be incomplete, after the end of its prompt."""
        if self._empty is None or not answer:
            return
        before = self._by_owner.get(owner, self._empty)
        text = [*prompt[-CONTEXT:], *answer]
        self._by_owner[owner] = before.with_texts([text])
