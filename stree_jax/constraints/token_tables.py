"""Turns an automaton of bytes into an automaton of a model's tokens.

A token leads from a state to the state after its bytes. Most tokens lead from each
state to the same state as many others do; these are one class, and the table has a
column for each class only.

Letters: S states, C classes, V tokens, L forced tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stree_jax.constraints.expression import ByteAutomaton, useful
from stree_jax.cpu_kernels import token_walk
from stree_jax.sampling.constraints import MOST_CLOSING, NONE

MOST_CLASSES = 20_000
MOST_FORCED = 16  # L
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of the hashes of columns

Encode = Callable[[bytes], list[int]]
"""A function that returns the usual tokens of a piece of text."""


@dataclass(frozen=True, eq=False)
class TokenTables:
    """An automaton of tokens, see `sampling.constraints.Constraints`.

    Attributes:
      classes: [V] int32. Class of each token; class 0 is that of tokens that are never
        allowed.
      following: [S, C] int32. State after a token of each class; `NONE` if it is not
        allowed.
      may_end: [S] bool.
      forced: [S, L] int32. Tokens that spell what must follow, padded with `NONE`.
    """

    classes: np.ndarray
    following: np.ndarray
    may_end: np.ndarray
    forced: np.ndarray

    @cached_property
    def closing(self) -> np.ndarray:
        """[S] int32. The only token that is allowed in a state, if only one token is
        allowed after it, too, and so on until the text is complete; else `NONE`."""
        allowed, V = self.following >= 0, len(self.classes)
        sizes = np.bincount(self.classes, minlength=allowed.shape[1])
        single = (allowed @ sizes == 1) & ~self.may_end
        token_of = np.zeros(allowed.shape[1], np.int32)
        token_of[self.classes] = np.arange(V)
        column = np.argmax(allowed & (sizes > 0), axis=1)
        after = self.following[np.arange(len(allowed)), column]
        ends = self.may_end & ~allowed.any(axis=1)
        for _ in range(MOST_CLOSING):
            ends = ends | (single & ends[after])
        return np.where(single & ends, token_of[column], NONE).astype(np.int32)


def token_tables(
    automaton: ByteAutomaton,
    pieces: Sequence[bytes],
    num_tokens: int,
    encode: Encode,
    name: str = "constraint",
    free: np.ndarray | None = None,
) -> TokenTables:
    """Returns the automaton of tokens.

    Args:
      automaton: the automaton of bytes.
      pieces: the bytes of each token; tokens without bytes are never allowed, except
        in free states.
      num_tokens: V. Tokens beyond `pieces` are never allowed.
      encode: returns the usual tokens of a piece of text.
      name: name of the constraint, for messages.
      free: [S] bool. True for states in which tokens without bytes are allowed, and
        change nothing. If None, there are none.

    Raises:
      ValueError: the tokens cannot spell any text that the automaton accepts, or there
        are too many classes.
    """
    steps, kinds = _by_kind(automaton.steps)
    translated = [piece.translate(kinds) for piece in pieces[:num_tokens]]
    alike = sorted({piece for piece in translated if piece})
    place = {piece: i + 1 for i, piece in enumerate(alike)} | {b"": 0}
    which = np.zeros(num_tokens, np.int64)  # 0 for tokens without bytes
    which[: len(translated)] = [place[piece] for piece in translated]
    states = len(steps)
    hashes, counts = _hashes(steps, _Walk(alike))
    hashes = np.concatenate([np.zeros(1, np.uint64), hashes])
    _, first, classes = np.unique(hashes, return_index=True, return_inverse=True)
    classes = classes.reshape(-1)  # 0 for pieces that are never allowed: `unique` sorts
    if len(first) > MOST_CLASSES:
        raise ValueError(
            f"{name}: {len(first)} classes of tokens; want at most {MOST_CLASSES}, "
            "such as by smaller bounds on repetition"
        )
    following = np.full((states, len(first)), NONE, np.int32)
    walk, sizes = _Walk([alike[i - 1] for i in first[1:]]), np.bincount(classes)
    for state in range(states):
        found, after = walk.pieces(steps, state)
        following[state, 1 + found] = after
        if sizes[1 + found].sum() != counts[state]:
            raise ValueError(f"{name}: two classes of tokens have equal hashes")
    good = useful(following, automaton.may_end)
    if not good[0]:
        raise ValueError(f"{name}: the model's tokens cannot spell any text of it")
    following = np.where((following >= 0) & good[following], following, NONE)
    by_token = classes[which]
    if free is not None:
        by_token[which == 0] = len(first)
        unchanged = np.where(free, np.arange(states), NONE)
        following = np.column_stack([following, unchanged]).astype(np.int32)
    return TokenTables(
        classes=by_token.astype(np.int32),
        following=following,
        may_end=automaton.may_end,
        forced=_forced(automaton, encode),
    )


def _hashes(steps: np.ndarray, walk: "_Walk") -> tuple[np.ndarray, np.ndarray]:
    """Returns hashes [P] of pieces, which are equal if the pieces lead to the same
    state from each state, and the number [S] of pieces that may follow each state."""
    ends = np.append(walk.starts, len(walk.data))
    found = token_walk(steps, walk.data, ends)
    if found is not None:
        return found
    hashes = np.zeros(len(walk.sizes), np.uint64)
    counts = np.zeros(len(steps), np.int64)
    with np.errstate(over="ignore"):
        for state in range(len(steps)):
            pieces, after = walk.pieces(steps, state)
            mark = np.uint64(2 * state + 1) * _MULTIPLIER
            hashes[pieces] += _mixed((after.astype(np.uint64) + mark) * _MULTIPLIER)
            counts[state] = len(pieces)
    return hashes, counts


def _mixed(x: np.ndarray) -> np.ndarray:
    """Returns 64-bit hashes whose bits all depend on all bits of x (splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _by_kind(steps: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Returns the automaton [S, K] of kinds of bytes, which lead from each state to the
    same state, and the kind of each byte."""
    columns, kinds = np.unique(steps, axis=1, return_inverse=True)
    return np.ascontiguousarray(columns), kinds.reshape(-1).astype(np.uint8).tobytes()


class _Walk:
    """Walks the symbols of all pieces at once.

    Attributes:
      data: uint8. The symbols of all pieces.
      starts, sizes: [P] int64. Where each piece begins, and its number of symbols.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.sizes = np.array([len(piece) for piece in pieces], np.int64)
        self.longest = int(self.sizes.max(initial=0))
        self.data = np.frombuffer(b"".join(pieces), np.uint8)
        self.starts = np.cumsum(self.sizes) - self.sizes
        firsts = self.data[self.starts]
        self.by_first = np.argsort(firsts, kind="stable")
        self.ends = np.searchsorted(firsts[self.by_first], np.arange(257))

    def pieces(self, steps: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pieces that may follow a state, and the states after them."""
        row, kinds = steps[state], steps.shape[1]
        alive = [
            self.by_first[self.ends[kind] : self.ends[kind + 1]]
            for kind in np.flatnonzero(row >= 0)
        ]
        left = np.concatenate(alive) if alive else np.zeros(0, np.int64)
        at = row[self.data[self.starts[left]]]
        flat, done, after = steps.reshape(-1), [], []
        for place in range(1, self.longest + 1):
            ended = self.sizes[left] == place
            done.append(left[ended])
            after.append(at[ended])
            left, at = left[~ended], at[~ended]
            if not left.size:
                break
            symbols = self.data[self.starts[left] + place]
            at = flat[at.astype(np.int64) * kinds + symbols]
            left, at = left[at >= 0], at[at >= 0]
        found = np.concatenate(done) if done else np.zeros(0, np.int64)
        return found, np.concatenate(after) if after else np.zeros(0, np.int32)


def _forced(automaton: ByteAutomaton, encode: Encode) -> np.ndarray:
    """Returns the tokens [S, L] that spell what must follow each state."""
    steps, may_end = automaton
    single = ((steps >= 0).sum(axis=1) == 1) & ~may_end
    byte, found = np.argmax(steps >= 0, axis=1), {}
    table = np.full((len(steps), MOST_FORCED), NONE, np.int32)
    for state in np.flatnonzero(single):
        text, at = bytearray(), int(state)
        while single[at] and len(text) < 8 * MOST_FORCED:
            text.append(byte[at])
            at = int(steps[at, byte[at]])
        spelled = bytes(text)
        if spelled not in found:
            found[spelled] = encode(spelled)[:MOST_FORCED]
        table[state, : len(found[spelled])] = found[spelled]
    return table
