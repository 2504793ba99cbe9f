"""Earlier texts, in which prompt lookup searches in addition to the text itself.

Letters: B prompts, E size of the texts of a prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.common.checks import integer, shown
from stree_jax.common.rows import symbolic_dimension
from stree_jax.models.base.serialization import register_for_export

SEPARATOR = -1  # the entry between two texts, and of padding
MOST_TOKENS = 2**20  # lookup searches all of them at each step
LEAST_CAPACITY = 1024
Texts = Sequence[Sequence[int]]


@register_for_export
@struct.dataclass
class EarlierTexts:
    """Texts from which prompt lookup drafts, in addition to the text itself: what
    the model wrote in an earlier epoch, or for similar requests. They change the speed,
    never the output.

    It is an immutable pytree of fixed size, so that new texts compile nothing. If it is
    full, the oldest texts are dropped.

    Attributes:
      tokens: [E] ints for all prompts, or [B, E] ints, texts for each prompt; the
        newest last. -1 stands between texts, and is padding.

    Example:
      >>> model = stree_jax.load("demo")
      >>> run = dict(max_new_tokens=32, tree="chain:7")
      >>> first = stree_jax.generate(model, "def area(r):", **run)
      >>> earlier = EarlierTexts.of(first.tokens)
      >>> again = stree_jax.generate(model, "def area(r):", earlier=earlier, **run)
      >>> again.tokens == first.tokens
      True
      >>> bool(again.target_calls[0] < first.target_calls[0])
      True
    """

    tokens: Any

    @classmethod
    def of(cls, texts: Texts, *, capacity: int | None = None) -> "EarlierTexts":
        """Returns the texts, for all prompts.

        Args:
          texts: lists of token ids, the newest last.
          capacity: E, static. If None, the smallest power of two with space for the
            texts, and at least 1024.

        Raises:
          ValueError: a text is not a list of token ids, or the capacity is not in
            1 .. 2^20.
        """
        entries = sum(len(text) + 1 for text in _checked("texts", texts))
        if capacity is None:
            capacity = max(LEAST_CAPACITY, 1 << (entries - 1).bit_length())
            capacity = min(capacity, MOST_TOKENS)
        what = f"1..{MOST_TOKENS} tokens"
        capacity = integer("capacity", capacity, 1, MOST_TOKENS, what)
        return cls(np.full(capacity, SEPARATOR, np.int32)).with_texts(texts)

    @classmethod
    def of_rollouts(cls, texts: Any, prompts: Any) -> "EarlierTexts":
        """Returns the rollouts of each prompt as its texts; also inside `jax.jit`.

        Args:
          texts: the result of `GeneratedTokens.joined`, with n rows per prompt.
          prompts: B, static.

        Raises:
          ValueError: the texts are not n rows of each of B prompts.
        """
        rows = texts.tokens.shape[0]
        if not symbolic_dimension(prompts):
            what = f"the number of prompts of the {rows} texts"
            prompts = integer("prompts", prompts, 1, 2**31 - 1, what)
            if not symbolic_dimension(rows) and rows % prompts:
                raise ValueError(f"prompts: want {what}, got {prompts}")
        tokens = jnp.pad(texts.tokens, ((0, 0), (0, 1)))  # for a separator
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        tokens = jnp.where(place < texts.lengths[:, None], tokens, SEPARATOR)
        n = tokens.shape[0] // prompts  # first split the rows, which may be sharded
        return cls(tokens.reshape(prompts, n, -1).reshape(prompts, -1))

    def with_texts(self, texts: Any) -> "EarlierTexts":
        """Returns the texts followed by newer ones, in the same size.

        Not for use inside `jax.jit`, see `of_rollouts`.

        Args:
          texts: lists of token ids, the newest last, or the result of
            `GeneratedTokens.joined`; for `tokens` [B, E] a list of either for each
            prompt.

        Raises:
          ValueError: a text is not a list of token ids, or the number of prompts is
            another.
        """
        self.check()
        before = np.asarray(self.tokens, np.int32)
        if before.ndim == 1:
            return replace(self, tokens=_joined(before, _checked("texts", texts)))
        if len(texts) != len(before):
            raise ValueError(
                f"texts: want lists of {len(before)} prompts, got {len(texts)}"
            )
        rows = [
            _joined(row, _checked(f"texts[{i}]", more))
            for i, (row, more) in enumerate(zip(before, texts, strict=True))
        ]
        return replace(self, tokens=np.stack(rows))

    def check(self) -> None:
        """Raises ValueError if `tokens` are not integers with one or two axes."""
        shape, dtype = np.shape(self.tokens), getattr(self.tokens, "dtype", None)
        whole = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        if len(shape) not in (1, 2) or not whole or 0 in shape:
            raise ValueError(
                "earlier: want tokens as an array of integers [E] or [B, E], got "
                f"{dtype or type(self.tokens).__name__} {shape}"
            )

    def __repr__(self) -> str:
        return f"EarlierTexts(tokens {np.shape(self.tokens)})"


def _checked(name: str, texts: Any) -> list[np.ndarray]:
    """Returns texts as arrays; raises ValueError unless they are lists of token ids."""
    want = f"{name}: want a list of lists of token ids, got "
    if hasattr(texts, "lengths"):
        rows = zip(np.asarray(texts.tokens), np.asarray(texts.lengths), strict=True)
        texts = [row[:length] for row, length in rows]
    if isinstance(texts, str | bytes) or not hasattr(texts, "__iter__"):
        raise ValueError(want + shown(texts))
    found = []
    for i, text in enumerate(texts):
        try:
            ids = np.asarray(text)
        except (TypeError, ValueError):
            ids = np.asarray(None)
        ids = ids.astype(np.int32) if ids.size == 0 else ids
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{want}{shown(text)} at index {i}")
        found.append(ids)
    return found


def _joined(before: np.ndarray, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the last entries of earlier texts followed by further ones, each with a
    separator at its end. The size does not change."""
    parts = [before]
    for ids in texts:
        parts += [ids.astype(np.int32), np.full(1, SEPARATOR, np.int32)]
    return np.concatenate(parts)[-len(before) :]


def earlier_rows(
    earlier: Any, drafter: Any, batch: int, num_tokens: int
) -> jax.Array | None:
    """Returns the tokens of the earlier texts of B prompts, [B, E] int32; or None.

    Args:
      earlier: the argument of `generate`, which may be traced.
      drafter: the drafter of the decoder.
      batch: B.
      num_tokens: tokens of the vocabulary. Other ids end a text, as -1 does.

    Raises:
      ValueError: it is not `EarlierTexts`, has texts of another number of prompts, or
        the drafter does not use it.
    """
    if earlier is None:
        return None
    if not isinstance(earlier, EarlierTexts):
        raise ValueError(
            "earlier: want EarlierTexts, as EarlierTexts.of(lists of token ids) makes "
            f"them, got {shown(earlier)}"
        )
    earlier.check()
    if not drafter.looks_up:
        raise ValueError(
            "earlier: only prompt lookup drafts from earlier texts; give "
            "drafter='lookup', or tree='auto' with another drafter"
        )
    tokens = jnp.asarray(earlier.tokens, jnp.int32)
    if tokens.ndim == 2 and tokens.shape[0] != batch:
        raise ValueError(
            f"earlier: texts of {tokens.shape[0]} prompts, but {batch} prompts"
        )
    tokens = jnp.where((tokens >= 0) & (tokens < num_tokens), tokens, SEPARATOR)
    return jnp.broadcast_to(tokens, (batch, tokens.shape[-1]))
