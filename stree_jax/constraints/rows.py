"""Constraints of the rows of a batch, as tables on the device."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stree_jax.common.checks import shown
from stree_jax.constraints.constraint import Constraint
from stree_jax.constraints.expression import byte_automaton
from stree_jax.constraints.free_text import with_free_text
from stree_jax.constraints.kept import keep_tables, kept_tables
from stree_jax.constraints.reasoning import after_reasoning, anything
from stree_jax.constraints.strings import SPECIAL
from stree_jax.constraints.token_tables import MOST_FORCED, TokenTables, token_tables
from stree_jax.models import Model
from stree_jax.sampling.constraints import NONE, Constraints
from stree_jax.sampling.stop_strings import token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_BYTES = 2**28  # of the automata of a vocabulary that are kept in memory
LEAST_STATES = LEAST_CLASSES = 64  # sizes are powers of two, so that programs fit more
_vocabularies: "OrderedDict[tuple, Vocabulary]" = OrderedDict()


class Vocabulary:
    """The tokens of a model, and the automata that were made for them. It may be used
    by several threads.

    Attributes:
      tokenizer: the tokenizer.
      pieces: the bytes of each token.
      num_tokens: V.
      stops: the model's stop tokens.
    """

    def __init__(
        self, tokenizer: "Tokenizer", num_tokens: int, stops: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.num_tokens = tokenizer, num_tokens
        self.stops = tuple(stops)
        self.pieces = token_bytes(tokenizer)[:num_tokens]
        self._kept: OrderedDict[tuple, TokenTables] = OrderedDict()
        self._lock = threading.Lock()
        self._ids = {piece: i for i, piece in enumerate(self.pieces) if piece}
        self._longest = max(map(len, self._ids), default=0)
        digest = hashlib.sha256(str(num_tokens).encode())
        for piece in self.pieces:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        self._digest = digest.digest()

    def tables(self, constraint: Constraint) -> TokenTables:
        """Returns the automaton of a constraint, from memory, from disk, or new.

        Raises:
          ValueError: the constraint cannot be compiled, or this vocabulary cannot spell
            it.
        """
        key = (
            constraint.regex,
            constraint.special,
            constraint.behind,
            constraint.reasoning,
        )
        with self._lock:
            if (found := self._kept.get(key)) is None:
                found = self._made(constraint)
            self._kept[key] = found
            self._kept.move_to_end(key)
            while sum(map(_size, self._kept.values())) > MOST_BYTES:
                self._kept.popitem(last=False)
            return found

    def _made(self, constraint: Constraint) -> TokenTables:
        """Returns the automaton of a constraint, with its reasoning."""
        regex, reasoning = constraint.regex, constraint.reasoning
        if regex is None:
            text = anything(self.num_tokens)
        else:
            text = self._text(constraint, regex)
        if reasoning is None:
            return text
        end, begin = self._token(reasoning.end), None
        if reasoning.begin is not None:
            begin = self._token(reasoning.begin)
        # A text without a structure may end within its reasoning, as any text may.
        free = regex is None or constraint.behind is not None
        stops = () if free else self.stops
        stops = tuple(token for token in stops if token not in (end, begin))
        return after_reasoning(
            text, reasoning.budget, end, begin, stops, constraint.name
        )

    def _token(self, text: str) -> int:
        """Returns the token of a text."""
        token = self.tokenizer.token_to_id(text)
        if token is None or token >= self.num_tokens:
            want = f"want the text of one token of this model, got {shown(text)}"
            raise ValueError(f"reasoning: {want}")
        return token

    def _text(self, constraint: Constraint, regex: str) -> TokenTables:
        """Returns the automaton of a constraint without reasoning from disk, or a new
        one."""
        what = repr((regex, constraint.special, constraint.behind))
        key = hashlib.sha256(self._digest + what.encode("utf-8", "replace"))
        found = kept_tables(key.hexdigest(), self.num_tokens)
        if found is None:
            automaton, free = byte_automaton(regex, constraint.name), None
            if constraint.behind is not None:
                automaton, free = with_free_text(automaton, constraint.behind)
            pieces = self.pieces
            if constraint.special:
                pieces = self._with_special(constraint)
            tokens = pieces, self.num_tokens, self._encode
            found = token_tables(automaton, *tokens, constraint.name, free)
            keep_tables(key.hexdigest(), found)
        return found

    def _with_special(self, constraint: Constraint) -> list[bytes]:
        """Returns the bytes of each token, with those of the characters that stand for
        special tokens, which no other token may spell."""
        lead = SPECIAL[0].encode()[:1]
        pieces = [b"" if lead in piece else piece for piece in self.pieces]
        for text, char in zip(constraint.special, SPECIAL, strict=False):
            token = self.tokenizer.token_to_id(text)
            if token is not None and token < len(pieces):
                pieces[token] = char.encode()
        return pieces

    def _encode(self, data: bytes) -> list[int]:
        """Returns the usual tokens of a piece of text."""
        try:
            text = data.decode()
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # part of a character, or no token for it
            ids = []
        # Some tokenizers write a space before a text.
        inside = all(i < len(self.pieces) for i in ids)
        if inside and b"".join(self.pieces[i] for i in ids) == data:
            return list(ids)
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Returns tokens that spell bytes, the longest first; as far as they do."""
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (found := self._ids.get(data[at : at + size])) is not None:
                    ids.append(found)
                    at += size
                    break
            else:
                break
        return ids


def _size(tables: TokenTables) -> int:
    return tables.following.nbytes + tables.classes.nbytes + tables.forced.nbytes


def vocabulary_of(model: Model, name: str = "constraint") -> Vocabulary:
    """Returns the tokens of a model. The last ones are kept.

    Raises:
      ValueError: the model has no tokenizer, or the bytes of its tokens are unknown.
    """
    if model.tokenizer is None:
        raise ValueError(f"{name}: this model has no tokenizer.json")
    key = id(model.tokenizer), model.config.num_tokens, model.config.stop_tokens
    if key not in _vocabularies:
        try:
            found = Vocabulary(model.tokenizer, *key[1:])
        except ValueError as error:
            reason = str(error).replace("stop strings need", "constraints need")
            raise ValueError(f"{name}: {reason}") from None
        _vocabularies[key] = found  # which keeps the tokenizer, and so its id
    _vocabularies.move_to_end(key)
    while len(_vocabularies) > 4:
        _vocabularies.popitem(last=False)
    return _vocabularies[key]


def constraint_rows(
    model: Model, constraints: Sequence[Constraint | None], n: int = 1
) -> Constraints | None:
    """Returns the automata of B prompts with n rows each, as an argument of
    `generate_tokens` that `jax.jit` can take. None if no prompt has a constraint.

    Sizes are powers of two: a program that was compiled for one constraint also runs
    others of similar size.

    Args:
      model: the target, with its tokenizer.
      constraints: one for each prompt, or None.
      n: rows per prompt.

    Raises:
      ValueError: a constraint cannot be compiled for this model's tokens.

    Example:
      >>> model = stree_jax.load("demo")
      >>> rows = constraint_rows(model, [stree_jax.Constraint("[0-9]+"), None])
      >>> rows.start.tolist()
      [0, -1]
    """
    given = [one for one in constraints if one is not None]
    if not given:
        return None
    vocabulary = vocabulary_of(model, given[0].name)
    distinct = list(dict.fromkeys(replace(one, written=()) for one in given))
    tables = [vocabulary.tables(one) for one in distinct]
    which, start = [], []
    for one in constraints:
        place = 0 if one is None else distinct.index(replace(one, written=()))
        which += [place] * n
        state = NONE if one is None else _state_after(tables[place], one)
        start += [state] * n
    rows = np.array(which, np.int32), np.array(start, np.int32)
    return Constraints(*map(jax.device_put, (*stacked(tables), *rows)))


def _state_after(tables: TokenTables, constraint: Constraint) -> int:
    """Returns the state after the tokens that a constraint has seen.

    Raises:
      ValueError: they break the constraint.
    """
    state, V = 0, len(tables.classes)
    for token in constraint.written:
        known = 0 <= token < V and state >= 0
        state = int(tables.following[state, tables.classes[token]]) if known else NONE
    if state < 0:
        raise ValueError(f"{constraint.name}: the text so far does not match it")
    if tables.may_end[state] and not (tables.following[state] >= 0).any():
        raise ValueError(f"{constraint.name}: the text so far is complete")
    return state


def stacked(
    tables: Sequence[TokenTables], states: int = 0, classes: int = 0
) -> tuple[np.ndarray, ...]:
    """Returns automata as the arrays of `Constraints` without those by row, padded to
    powers of two.

    Args:
      tables: the automata.
      states, classes: smallest S and C.
    """
    shapes = [(states, classes), *(t.following.shape for t in tables)]
    S, C = padded_shape(*(max(sizes) for sizes in zip(*shapes, strict=True)))
    tables = [*tables, *[tables[-1]] * (power_of_two(len(tables)) - len(tables))]

    def padded(name: str, shape: tuple[int, ...], fill: Any) -> np.ndarray:
        rows = [getattr(t, name) for t in tables]
        found = np.full((len(rows), *shape), fill, rows[0].dtype)
        for to, row in zip(found, rows, strict=True):
            to[tuple(map(slice, row.shape))] = row
        return found

    V = tables[0].classes.shape[0]
    return (
        padded("classes", (V,), 0),
        padded("following", (S, C), NONE),
        padded("may_end", (S,), False),
        padded("forced", (S, MOST_FORCED), NONE),
        padded("closing", (S,), NONE),
    )


def padded_shape(states: int, classes: int) -> tuple[int, int]:
    """Returns the shape of the table of an automaton in `Constraints`."""
    S, C = max(LEAST_STATES, states), max(LEAST_CLASSES, classes)
    return power_of_two(S), power_of_two(C)


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def constraints_by_row(value: Any, rows: int) -> list[Constraint | None]:
    """Returns one constraint, or None, for each prompt.

    Args:
      value: a `Constraint` for all prompts, a list with one (or None) for each, or
        None.
      rows: number of prompts.

    Raises:
      ValueError: `value` has another form.
    """
    if value is None or isinstance(value, Constraint):
        return [value] * rows
    listed: list[Any] = list(value) if isinstance(value, list | tuple) else [0]
    if len(listed) != rows or not all(
        one is None or isinstance(one, Constraint) for one in listed
    ):
        raise ValueError(
            f"constraint: want a Constraint for all prompts, or a list of one (or "
            f"None) for each of the {rows}, got {shown(value)}"
        )
    return listed
