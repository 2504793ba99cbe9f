"""The automaton of an answer after reasoning, whose tokens may be limited.

Reasoning is free until the token that ends it. At the limit this token is the only one
that is allowed.

Letters: S states, C classes, V tokens, N the largest number of reasoning tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stree_jax.common.checks import as_integer, shown
from stree_jax.constraints.token_tables import MOST_FORCED, TokenTables
from stree_jax.sampling.constraints import NONE

MOST_TOKENS = 2**15  # of reasoning
MOST_ENTRIES = 2**25  # of the table of states and classes


@dataclass(frozen=True)
class Reasoning:
    """The reasoning before an answer.

    Attributes:
      budget: largest number of tokens of the reasoning, or None.
      end: text of the token that ends it.
      begin: text of the token that begins it, if the model writes this token itself as
        its first one. An answer that begins otherwise has no reasoning. If None, the
        prompt ends within reasoning.

    Example:
      >>> stree_jax.Reasoning(256).end
      '</think>'
    """

    budget: int | None = None
    end: str = "</think>"
    begin: str | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            budget = as_integer(self.budget)
            if budget is None or not 0 <= budget <= MOST_TOKENS:
                want = f"a number of tokens in 0..{MOST_TOKENS}"
                raise ValueError(f"budget: want {want}, got {shown(self.budget)}")
            object.__setattr__(self, "budget", budget)
        for name in ("end", "begin"):
            text = getattr(self, name)
            if not (isinstance(text, str) and text) and (name, text) != ("begin", None):
                want = f"{name}: want the text of a token, got {shown(text)}"
                raise ValueError(want)


def anything(num_tokens: int) -> TokenTables:
    """Returns the automaton that allows all V tokens at any time."""
    return TokenTables(
        classes=np.ones(num_tokens, np.int32),
        following=np.array([[NONE, 0]], np.int32),
        may_end=np.ones(1, bool),
        forced=np.full((1, MOST_FORCED), NONE, np.int32),
    )


def after_reasoning(
    tables: TokenTables,
    budget: int | None,
    end: int,
    begin: int | None = None,
    stops: Sequence[int] = (),
    name: str = "reasoning",
) -> TokenTables:
    """Returns the automaton of reasoning, its end, and a text.

    Args:
      tables: automaton of the text.
      budget, begin: see `Reasoning`; `begin` as a token.
      end: the token that ends the reasoning.
      stops: tokens that are not allowed in the reasoning.
      name: name of the option, for messages.

    Raises:
      ValueError: the automaton is too large.
    """
    own = list(dict.fromkeys([end, *([] if begin is None else [begin]), *stops]))
    tables = _separated(tables, own)
    column = {token: int(tables.classes[token]) for token in own}
    first, N = int(begin is not None), budget or 0
    offset = first + N + 1  # of the states of the text
    S, C = tables.following.shape
    if (offset + S) * C > MOST_ENTRIES:
        want = f"a budget of at most {max(0, MOST_ENTRIES // C - S - 2)} tokens"
        raise ValueError(f"{name}: want {want} before this constraint, got {N}")
    following = np.full((offset + S, C), NONE, np.int32)
    text = np.where(tables.following < 0, NONE, tables.following + offset)
    following[offset:] = text
    counted = np.arange(first, offset, dtype=np.int32)[:, None]
    following[first:offset] = counted if budget is None else counted + 1
    if budget is not None:
        following[offset - 1] = NONE
    following[first:offset, [column[token] for token in stops]] = NONE
    following[first:offset, column[end]] = offset
    may_end = np.concatenate([np.zeros(offset, bool), tables.may_end])
    forced = np.full((offset + S, MOST_FORCED), NONE, np.int32)
    forced[offset:] = tables.forced
    if budget is not None:
        forced[offset - 1] = [end, *tables.forced[0, :-1]]
    if begin is not None:
        following[0], may_end[0], forced[0] = text[0], tables.may_end[0], NONE
        following[0, column[begin]] = first
    return TokenTables(tables.classes, following, may_end, forced)


def _separated(tables: TokenTables, tokens: Sequence[int]) -> TokenTables:
    """Returns an equal automaton in which some tokens have classes of their own."""
    classes, columns = tables.classes.copy(), [tables.following]
    for token in tokens:
        columns.append(tables.following[:, [tables.classes[token]]])
        classes[token] = tables.following.shape[1] + len(columns) - 2
    return replace(tables, classes=classes, following=np.concatenate(columns, axis=1))
